"""What a run shows and leaves: it must be true, readable, and survive any text and any number."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from ppo import report
from ppo.report import ModelRow, Report, Sample, main, write_page
from ppo.report_curves import (
    LIGHT,
    PANELS,
    Panel,
    _draw,
    panel_png,
    running_mean,
    shown_panels,
    write_curves,
)
from ppo.report_figures import changes, clock, number, parameters, sparkline
from ppo.report_files import read_run

FIGURES = {
    "objective/scores": 0.5,
    "objective/kl": 1.25,
    "loss/policy_avg": -0.0123,
    "loss/value_avg": 0.75,
    "tokens/response_length_mean": 21.5,
    "time/step": 2.0,
}
NASTY = "[bold]x[/bold] [/] :smile: <script>alert('1')</script> & \"q\" 好😀 $x_1$"
COMMAND = "python -m ppo.train --actor run/actor"
VOID = {"meta", "img", "source", "br"}


def plain(width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Page(HTMLParser):
    """Texts, links and balance of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of three steps, from models to page."""
    tmp_path, console = tmp_path_factory.mktemp("run"), plain()
    (tmp_path / "config.yaml").write_text("ppo:\n  kl_coef: 0.05 # <b>\n")
    with Report(tmp_path, 3, console=console) as run:
        run.models([ModelRow("actor", "some/model", "LlamaForCausalLM", 530_432, True)])
        for step in range(3):
            run.step(step, {**FIGURES, "objective/scores": step - 0.5})
        run.samples(2, [Sample("p" + NASTY, "r" + NASTY, 0.25)])
        before, after = [Sample("ask", "old answer", -1)], [Sample("ask", "new " + NASTY, 1.5)]
        run.before({"score": -1.0}, before)
        run.finish({"score": 1.5}, after, COMMAND)
    return tmp_path, printed(console)


def strict(line: str) -> dict[str, object]:
    """Parse JSON, refusing the NaN and Infinity that only Python reads."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found = json.loads(line, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def test_metrics_are_on_disk_after_each_step_and_keep_what_is_not_finite(tmp_path: Path) -> None:
    with Report(tmp_path, 2, console=plain()) as run:
        run.step(4, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})
        line = (tmp_path / "metrics.jsonl").read_text()
    row = strict(line)
    assert line.endswith("\n")
    assert list(row.items()) == [
        ("step", 4),
        ("a", "NaN"),
        ("b", "Infinity"),
        ("c", "-Infinity"),
        ("d", 0.1),
    ]
    [back] = read_run(tmp_path).metrics
    assert math.isnan(back.pop("a"))
    assert back == {"step": 4, "b": math.inf, "c": -math.inf, "d": 0.1}


def test_without_a_terminal_each_step_is_one_aligned_line(tmp_path: Path) -> None:
    console = plain(80)
    with Report(tmp_path, 3, console=console) as run:
        run.step(0, FIGURES)
        run.step(1, {**FIGURES, "objective/scores": -1234.5678, "loss/value_avg": math.nan})
        run.step(2, {})
    text = printed(console)
    head, *lines = text.splitlines()
    assert len(lines) == 3
    assert re.split(r"\s{2,}", head.strip())[:3] == ["step", "score", "KL"]
    assert " ".join(lines[0].split()) == "0 0.500 1.250 -0.0123 0.7500 21.5 2.00 0:04"
    assert " ".join(lines[1].split()) == "1 -1234.568 1.250 -0.0123 nan 21.5 2.00 0:02"
    assert lines[2].split()[1:6] == ["-"] * 5
    ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", head)]
    assert [match.end() for match in re.finditer(r"\S+", lines[0])] == ends
    assert {len(line) for line in lines} == {len(head)}
    assert len(head) <= 80
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_on_a_terminal_a_bar_moves_and_samples_print_above_it(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    with Report(tmp_path, 2, console=console) as run:
        run.step(0, FIGURES)
        run.samples(0, [Sample("question", "answer", 0.5)])
        run.step(1, {**FIGURES, "objective/scores": 0.875})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "score 0.875" in text
    assert "KL 1.250   policy loss -0.0123   value loss 0.7500   length 21.5" in text
    assert "2/2 2.00 s/step, 0:00 left" in text
    assert text.index("answer") < text.rindex("2/2")
    assert "\x1b[?25h" in file.getvalue(), "the cursor is shown again"


def test_sample_texts_print_as_they_are(tmp_path: Path) -> None:
    console = plain(200)
    with Report(tmp_path, 1, console=console) as run:
        run.samples(0, [Sample("p" + NASTY, "two\nlines\x1b[31m\r\x07" + "y" * 999, 0.5)])
    text = printed(console)
    assert "p" + NASTY in text
    assert "two ↵ lines" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert text.count("y") < 500
    assert "more" in text


def test_at_most_five_samples_print_and_all_are_kept(tmp_path: Path) -> None:
    console = plain()
    rows = [Sample(f"prompt{i}", f"line {i}\n\ud800 \u2028", math.nan) for i in range(7)]
    with Report(tmp_path, 1, console=console) as run:
        run.samples(0, rows)
        run.samples(10, rows[:2])
    assert "step 0: 5 of 7 responses" in printed(console)
    assert "prompt5" not in printed(console)
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    kept = [strict(line) for line in lines]
    assert [row["step"] for row in kept] == [0] * 7 + [10] * 2
    assert kept[3] == {
        "step": 0,
        "prompt": "prompt3",
        "response": "line 3\n? \u2028",
        "score": "NaN",
    }
    assert {step: len(rows) for step, rows in read_run(tmp_path).samples.items()} == {0: 7, 10: 2}


def test_a_console_without_unicode_shows_question_marks(tmp_path: Path) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=100)
    with Report(tmp_path / "好", 1, console=console) as run:
        run.models([ModelRow("actor", "好", "Llama", 12, False)])
        run.step(0, {"objective/kl": 1.0})
        run.samples(0, [Sample("好", NASTY, 1.0)])
        run.finish({}, [Sample("好", "😀", 1.0)], "python 好")
    assert b"go on:  python ?" in raw.getvalue()


def test_finish_prints_before_and_after_and_how_to_go_on(finished: tuple[Path, str]) -> None:
    run_dir, text = finished
    row = next(line for line in text.splitlines() if "old answer" in line)
    assert re.split(r"\s{2,}", row.strip())[:4] == [
        "ask",
        "old answer",
        "-1.000",
        "new [bold]x[/bold] [/] :smile:",
    ]
    assert re.search(r"held-out score +-1\.000 +1\.500", text)
    assert re.search(r"training score +-0\.500 +1\.500 +▁▅█", text)
    assert re.search(r"actor +LlamaForCausalLM +0\.53 M +trains", text)
    assert "report.html     this report with curves" in text
    assert text.rstrip().splitlines()[-1] == f"go on:  {COMMAND}"
    assert str(run_dir) in text.splitlines()


def test_the_page_escapes_texts_and_loads_nothing(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    page = Page(run_dir / "report.html")
    assert page.open == []
    assert "script" not in page.tags
    for text in (
        "p" + NASTY,
        "r" + NASTY,
        "new " + NASTY,
        "old answer",
        "kl_coef: 0.05 # <b>",
        COMMAND,
    ):
        assert text in page.text
    assert "3 of 3 steps, finished" in page.text
    assert len(page.links) == 2 * 5, "five panels have figures, each drawn light and dark"
    assert len(set(page.links)) == 2 * 5
    assert all(link.startswith("data:image/png;base64,iVBOR") for link in page.links)
    source = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in source
    assert 'name="viewport"' in source


def test_the_page_comes_from_the_files_alone(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    first = (run_dir / "report.html").read_bytes()
    for name in ("report.html", "curves.png"):
        (run_dir / name).unlink()
    assert write_page(run_dir) == run_dir / "report.html"
    assert (run_dir / "report.html").read_bytes() == first
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_response_that_is_missing_is_said_to_be(tmp_path: Path) -> None:
    console = plain()
    with Report(tmp_path, 1, console=console) as run:
        run.finish({}, [Sample("ask", "new", 1.5)], COMMAND)
    assert re.search(r"ask +not sampled +- +new +1\.500", printed(console))
    assert "before: not sampled" in Page(tmp_path / "report.html").text


def test_interrupted_says_how_far_it_came_and_writes_the_page(tmp_path: Path) -> None:
    console = plain()
    with Report(tmp_path, 40, console=console) as run:
        run.step(0, {"objective/kl": 1.0})
        run.interrupted(COMMAND)
    assert "interrupted after 1 of 40 steps" in printed(console)
    assert printed(console).endswith(f"go on:  {COMMAND}\n")
    assert "1 of 40 steps, interrupted" in Page(tmp_path / "report.html").text


def test_an_error_passes_through_with_a_hint(tmp_path: Path) -> None:
    console = plain(40)

    def fail() -> None:
        with Report(tmp_path, 2, console=console) as run:
            run.step(0, FIGURES)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert f"python -m ppo.report {tmp_path}\n" in printed(console)
    assert read_run(tmp_path).summary.state == "stopped by an error"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{}],
        [{"objective/scores": math.nan, "objective/kl": math.inf}],
        [{"objective/scores": 3e38, "val/explained_variance": -1e30}, {"objective/scores": -1e300}],
        [{"objective/kl": 1e308}, {"objective/kl": 1e308}],
        [{}, {"loss/value_avg": 1.0}, {"objective/kl": 0.0}],
    ],
    ids=["empty", "no metrics", "not finite", "huge", "beyond float32", "missing keys"],
)
def test_odd_runs_end_in_a_page(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    with Report(tmp_path, 1, console=plain()) as run:
        run.models([])
        for step, row in enumerate(rows):
            run.step(step, row)
        run.samples(0, [])
        run.before({"score": math.nan}, [])
        run.finish({}, [], "")
    assert Page(tmp_path / "report.html").open == []
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_steps_that_are_not_finite_are_named(tmp_path: Path) -> None:
    console = plain()
    with Report(tmp_path, 2, console=console) as run:
        run.step(0, {"loss/value_avg": math.nan})
        run.step(1, {"loss/value_avg": 1.0})
        run.finish({}, [], "")
    assert "warning: loss/value_avg was NaN or infinite in 1 of 2 steps" in printed(console)
    assert "marked ×: loss/value_avg (1)." in Page(tmp_path / "report.html").text


def test_lines_cut_short_or_without_a_step_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1.0}\n{"a": 2.0}\n{"step": 1, "a')
    assert read_run(tmp_path).metrics == [{"step": 0, "a": 1.0}]


def test_a_page_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run_dir: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_page", full)
    console = plain()
    with Report(tmp_path, 1, console=console) as run:
        run.finish({}, [], COMMAND)
    assert "no page: [Errno 28] No space left on device" in printed(console)
    assert f"go on:  {COMMAND}" in printed(console)


def test_main_prints_and_rebuilds(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = finished
    (run_dir / "report.html").unlink()
    assert main([str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "held-out score" in out
    assert f"page: {run_dir / 'report.html'}" in out
    assert (run_dir / "report.html").is_file()


def test_main_refuses_a_folder_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    expected = f"error: {tmp_path} holds no metrics.jsonl: not the folder of a run\n"
    assert capsys.readouterr().err == expected


def test_importing_the_report_does_not_import_matplotlib() -> None:
    code = "import sys, ppo.report; sys.exit('matplotlib' in sys.modules)"
    root = Path(report.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(None), "-"),
        (number(math.nan), "nan"),
        (number(0.0), "0.000"),
        (number(-1.23456), "-1.235"),
        (number(0.00234), "0.00234"),
        (number(1234.5), "1234.5"),
        (number(-2.5e7, 3), "-2.5e+07"),
        (number(0.00001, 4), "0.0000"),
        (clock(59.6), "1:00"),
        (clock(3725), "1:02:05"),
        (clock(-3), "0:00"),
        (parameters(530_432), "0.53 M"),
        (parameters(8_190_735_360), "8.19 B"),
        (parameters(2304), "2,304"),
        (sparkline([0, 1, 2, 3, 4, 5, 6, 7]), "▁▂▃▄▅▆▇█"),
        (sparkline([0, 2, 7, 7], width=2), "▁█"),
        (sparkline([1, math.nan, math.inf, 3]), "▁  █"),
        (sparkline([2, 2]), "▁▁"),
        (sparkline([]), ""),
    ],
)
def test_figures_read_well(shown: str, expected: str) -> None:
    assert shown == expected


def test_changes_pair_held_out_figures_and_take_first_and_last_step() -> None:
    figures = {"score before": 1.0, "objective/judge before": 0.5, "score after": 2.0, "seconds": 9}
    metrics = [{"step": 0, "objective/kl": 0.0}, {"step": 1}, {"step": 2, "objective/kl": 3.0}]
    found = [(each.name, each.before, each.after) for each in changes(figures, metrics)]
    assert found == [
        ("held-out score", 1.0, 2.0),
        ("held-out judge", 0.5, None),
        ("seconds", None, 9),
        ("KL, nats/sequence", 0.0, 3.0),
    ]


def test_curves_show_what_was_measured() -> None:
    assert running_mean([5, 6, 7, 8], [1, 3, math.nan, 5], 2) == ([5, 6, 7, 8], [1, 2, 3, 5])
    steps, means = running_mean(range(100), [float(i) for i in range(100)], 40)
    assert steps == list(range(3, 100, 4))
    assert means[-1] == sum(range(60, 100)) / 40
    panel = next(panel for panel in PANELS if panel.title == "Value loss")
    assert shown_panels([{"step": 0, "loss/value_avg": 1.0}]) == [panel]
    axes = Figure().subplots()
    metrics = [{"step": i, "loss/value_avg": y} for i, y in enumerate([4.0, math.nan, 2.0])]
    _draw(axes, panel, [*metrics, {"step": 3}], LIGHT)
    curve, crosses = axes.lines
    assert list(curve.get_xdata()) == [0, 1, 2, 3]
    assert [y for y in curve.get_ydata() if not math.isnan(y)] == [4, 2]
    assert list(crosses.get_xdata()) == [1]
    assert axes.get_ylabel() == "½ · reward²"


@pytest.mark.parametrize(("values", "cut"), [([-40.0, 0.5], True), ([-40.0, -30.0], False)])
def test_a_bad_start_does_not_flatten_the_rest(values: list[float], cut: bool) -> None:
    panel = next(panel for panel in PANELS if panel.floor is not None)
    axes = Figure().subplots()
    metrics = [{"step": i, panel.lines[0][0]: value} for i, value in enumerate(values)]
    _draw(axes, panel, metrics, LIGHT)
    assert (axes.get_ylim()[0] == panel.floor) == cut
    assert axes.get_ylim()[1] > values[1]


def test_looks_are_no_reason_to_warn() -> None:
    no_such_glyph = Panel("title", "好", (("objective/kl", "KL"),), "healthy")
    assert panel_png(no_such_glyph, [{"step": 0, "objective/kl": 1.0}], LIGHT)


def test_curves_ignore_the_settings_of_the_person_and_formulas_in_names(tmp_path: Path) -> None:
    metrics = [{"step": step, "objective/kl": float(step)} for step in range(60)]
    with matplotlib.rc_context({"text.usetex": True, "figure.facecolor": "black"}):
        write_curves(tmp_path / "theirs.png", "$\\frac$ 好", metrics)
    write_curves(tmp_path / "ours.png", "$\\frac$ 好", metrics)
    assert (tmp_path / "theirs.png").read_bytes() == (tmp_path / "ours.png").read_bytes()
