"""What a run prints: tables and lines in which the texts of models stay what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ppo.report_figures import changes, not_finite, number, parameters, sparkline
from ppo.report_files import ModelRow, Sample, Summary

SHOWN_SAMPLES = 5
LONGEST_TEXT = 400
CONTENTS = {
    "actor": "the trained policy, for from_pretrained",
    "critic": "the trained value model",
    "checkpoints": "where the run stands, for --resume",
    "config.yaml": "every setting of the run",
    "metrics.jsonl": "all metrics, one line a step",
    "samples.jsonl": "prompts, responses and scores along the training",
    "report.html": "this report with curves; open it in a browser",
    "curves.png": "the curves alone",
    "report.json": "models, held-out samples and summary",
}


@dataclass(frozen=True)
class Printer:
    """Print to a console without markup, control codes or characters that it cannot encode."""

    console: Console

    def encode(self, text: str) -> Text:
        """Text for this console; what its encoding lacks becomes "?"."""
        encoding = self.console.encoding
        return Text(text.encode(encoding, "replace").decode(encoding))

    def cell(self, text: str) -> Text:
        """Text for a table: on one line, cut when very long."""
        rest = len(text) - LONGEST_TEXT
        if rest > 0:
            text = f"{text[:LONGEST_TEXT]} ... ({rest} more characters)"
        lines = text.strip().replace("\n", " ↵ ")
        return self.encode("".join(each if each.isprintable() else " " for each in lines))

    def line(self, text: str) -> None:
        """A line that is never folded, so that paths and commands can be copied."""
        self.console.print(self.encode(text), soft_wrap=True)

    def table(self, title: str, *names: str, **options: bool) -> Table:
        """An empty table; texts that do not fit are folded."""
        table = Table(
            title=self.encode(title),
            title_justify="left",
            title_style="bold",
            box=box.HORIZONTALS,
            **options,  # type: ignore[arg-type]
        )
        for name in names:
            figure = name in ("score", "start", "end", "parameters")
            table.add_column(
                name, overflow="fold", justify="right" if figure else "left", no_wrap=figure
            )
        return table

    def models(self, rows: Sequence[ModelRow]) -> None:
        """Which model is which."""
        table = self.table("models", "role", "model", "parameters", "weights")
        home = str(Path.home())
        for row in rows:
            source = row.source.replace(home, "~", 1) if row.source.startswith(home) else row.source
            model = self.cell(row.architecture) + Text("\n") + self.cell(source)
            model.stylize("dim", len(row.architecture))
            weights = "trains" if row.trains else "frozen"
            table.add_row(self.cell(row.role), model, parameters(row.parameters), weights)
        self.console.print(table)

    def samples(self, title: str, rows: Sequence[Sample]) -> None:
        """The first few samples."""
        shown = rows[:SHOWN_SAMPLES]
        title = f"{title}: {len(shown)} of {len(rows)} responses"
        table = self.table(title, "prompt", "response", "score", expand=True, show_lines=True)
        table.columns[0].ratio, table.columns[1].ratio = 2, 3
        for row in shown:
            table.add_row(self.cell(row.prompt), self.cell(row.response), number(row.score))
        self.console.print(table)

    def pairs(self, before: Sequence[Sample], after: Sequence[Sample]) -> None:
        """The first few held-out prompts, each with the response before and after."""
        pairs = list(zip_longest(before, after))
        title = f"held-out prompts: {min(SHOWN_SAMPLES, len(pairs))} of {len(pairs)}"
        names = ("prompt", "before", "score", "after", "score")
        table = self.table(title, *names, expand=True, show_lines=True)
        for column, ratio in zip(table.columns, (2, 3, None, 3, None), strict=True):
            column.ratio = ratio
        for old, new in pairs[:SHOWN_SAMPLES]:
            cells = [self.cell((old or new).prompt)]
            for sample in (old, new):
                cells.append(self.cell(sample.response if sample else "not sampled"))
                cells.append(self.cell(number(sample.score if sample else None)))
            table.add_row(*cells)
        if pairs:
            self.console.print(table)

    def outcome(self, summary: Summary, metrics: list[dict[str, float]]) -> None:
        """Held-out samples, figures at start and end, and what was not finite."""
        self.pairs(summary.before, summary.after)
        table = self.table("figures", "", "start", "end", "over the steps")
        for change in changes(summary.figures or {}, metrics):
            line = "" if self.console.options.ascii_only else sparkline(change.curve)
            table.add_row(self.cell(change.name), number(change.before), number(change.after), line)
        if table.row_count:
            self.console.print(table)
        for key, count in not_finite(metrics).items():
            self.line(f"warning: {key} was NaN or infinite in {count} of {len(metrics)} steps")

    def contents(self, run_dir: Path) -> None:
        """What lies in the run folder."""
        self.line(f"\n{run_dir}")
        for path in sorted(run_dir.iterdir()):
            if not path.name.startswith("."):
                name = path.name + ("/" if path.is_dir() else "")
                self.line(f"  {name:<16}{CONTENTS.get(path.name, '')}".rstrip())
