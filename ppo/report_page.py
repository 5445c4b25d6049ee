"""`report.html`: one self-contained page on a run, for a laptop and a phone, light and dark.

The page holds what models wrote, so every text is escaped and the page may load nothing.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path

from ppo.report_curves import (
    DARK,
    LIGHT,
    Panel,
    panel_png,
    shown_panels,
    smoothing,
    write_curves,
)
from ppo.report_figures import Change, changes, not_finite, number, parameters
from ppo.report_files import ModelRow, RunRecord, Sample, encodable, read_run

PAGE, CURVES = "report.html", "curves.png"
SHOWN_SAMPLES = 5

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --page: #f5f6f8; --ink: #1b1f24;
  --faint: #59636e; --line: #dfe3e8; --good: #1f5fd0; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --paper: #1a1e24; --page: #12151a;
  --ink: #e6e9ed; --faint: #9aa4af; --line: #333a43; --good: #7cabff; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem clamp(.8rem, 3vw, 2.5rem) 3rem; max-width: 82rem;
  background: var(--page); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .7rem; }
h3 { font-size: 1rem; margin: 0; }
p, figcaption, .faint { color: var(--faint); margin: .2rem 0; }
.card, figure, pre, details { background: var(--paper); border: 1px solid var(--line);
  border-radius: .5rem; padding: .8rem 1rem; margin: 0; }
.grid, .tiles, .cards { display: grid; gap: .8rem; }
.grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
.tiles { grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); }
.tiles b { display: block; font-size: 1.05rem; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
figure img { display: block; width: 100%; height: auto; margin-top: .4rem; }
figcaption { font-size: .875rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem 1.5rem; margin-top: .4rem; }
.pair > div { border-left: 3px solid var(--line); padding-left: .7rem; }
.pair > div + div { border-color: var(--good); }
.text { white-space: pre-wrap; }
.score { color: var(--faint); font-size: .875rem; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 500; font-size: .875rem; }
tr:last-child td { border-bottom: 0; }
.right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { overflow-x: auto; font-size: .875rem; white-space: pre-wrap; }
details { margin-bottom: .6rem; } summary { cursor: pointer; font-weight: 500; }
details pre { border: 0; padding: .6rem 0 0; }
@media (max-width: 40rem) {
  .pair { grid-template-columns: 1fr; }
  thead { display: none; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  tr:last-child { border: 0; } td { display: block; border: 0; padding: .1rem 0; }
  td[data-name]::before { content: attr(data-name) ": "; color: var(--faint); }
  .right { text-align: left; } 
  .tiles { grid-template-columns: 1fr 1fr; } .tiles .card { padding: .6rem; }
  .tiles b { font-size: 1rem; }
}
"""


def _text(text: str) -> str:
    """What a person or a model wrote, with its inner spaces, its lines and its direction."""
    return f'<span class="text" dir="auto">{escape(encodable(text.strip()))}</span>'


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int]) -> str:
    """A table of cells that are HTML already; on a phone each row becomes a block."""

    sides = ["right" if column in right else "left" for column in range(len(names))]
    head = "".join(
        f'<th class="{side}">{name}</th>' for side, name in zip(sides, names, strict=True)
    )
    body = ""
    for row in rows:
        cells = zip(sides, names, row, strict=True)
        body += "<tr>"
        body += "".join(
            f'<td class="{side}" data-name="{name}">{cell}</td>' for side, name, cell in cells
        )
        body += "</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _models(rows: Sequence[ModelRow]) -> str:
    cells = (
        (
            escape(row.role),
            escape(encodable(row.source)),
            escape(row.architecture),
            parameters(row.parameters),
            "trains" if row.trains else "frozen",
        )
        for row in rows
    )
    names = ("Role", "Source", "Architecture", "Parameters", "Weights")
    table = _table(names, cells, frozenset({3}))
    return f'<h2>Models</h2><div class="card">{table}</div>' if rows else ""


def _tile(change: Change) -> str:
    figures = number(change.after)
    if change.before is not None:
        figures = f"{number(change.before)} → {figures}"
    return (
        f'<div class="card"><span class="faint">{escape(change.name)}</span><b>{figures}</b></div>'
    )


def _pairs(before: Sequence[Sample], after: Sequence[Sample]) -> str:
    """Held-out prompts, each with the response before and after training."""

    def side(title: str, sample: Sample | None) -> str:
        if sample is None:
            return f'<div><span class="score">{title}: not sampled</span></div>'
        score = f'<span class="score">{title}, score {number(sample.score)}</span>'
        return f"<div>{score}<br>{_text(sample.response)}</div>"

    cards = []
    for old, new in zip_longest(before, after):
        known = new or old
        sides = side("before", old) + side("after", new)
        cards.append(
            f'<div class="card"><h3>{_text(known.prompt)}</h3><div class="pair">{sides}</div></div>'
        )
    if not cards:
        return ""
    rest = f"<p>The first {SHOWN_SAMPLES} of {len(cards)}, not chosen.</p>"
    more = f"<details><summary>{len(cards) - SHOWN_SAMPLES} more</summary>"
    more += f'<div class="cards">{"".join(cards[SHOWN_SAMPLES:])}</div></details>'
    return (
        "<h2>Held-out prompts, before and after training</h2>"
        + (rest if len(cards) > SHOWN_SAMPLES else "")
        + f'<div class="cards">{"".join(cards[:SHOWN_SAMPLES])}</div><br>'
        + (more if len(cards) > SHOWN_SAMPLES else "")
    )


def _figure(panel: Panel, metrics: list[dict[str, float]]) -> str:
    """A plot for each colour scheme, with its title and explanation as text."""
    light, dark = (
        f"data:image/png;base64,{b64encode(panel_png(panel, metrics, theme)).decode()}"
        for theme in (LIGHT, DARK)
    )
    return (
        f"<figure><h3>{panel.title}</h3><figcaption>{panel.healthy}</figcaption><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{panel.title}, {panel.unit}, over the steps"></picture></figure>'
    )


def _curves(metrics: list[dict[str, float]]) -> str:
    panels = shown_panels(metrics)
    if not panels:
        return "<h2>Curves</h2><p>No step was finished.</p>"
    window = smoothing(metrics)
    note = f"<p>Bold lines are means of the last {window} steps.</p>" if window > 1 else ""
    bad = ", ".join(f"{key} ({count})" for key, count in not_finite(metrics).items())
    if bad:
        note += f'<p class="bad">Steps with NaN or infinity, marked ×: {escape(bad)}.</p>'
    figures = "".join(_figure(panel, metrics) for panel in panels)
    return f'<h2>Curves</h2>{note}<div class="grid">{figures}</div>'


def _training_samples(samples: dict[int, list[Sample]]) -> str:
    names = ("Prompt", "Response", "Score")
    parts = []
    for step, rows in samples.items():
        shown = rows[:SHOWN_SAMPLES]
        cells = ((_text(row.prompt), _text(row.response), number(row.score)) for row in shown)
        table = _table(names, cells, frozenset({2}))
        opened = " open" if step == max(samples) else ""
        title = f"Step {step}: {len(shown)} of {len(rows)} responses"
        parts.append(f"<details{opened}><summary>{title}</summary>{table}</details>")
    return f"<h2>Samples along the training</h2>{''.join(parts)}" if parts else ""


def page(record: RunRecord) -> str:
    """The page as HTML."""
    summary, name = record.summary, escape(encodable(record.name))
    done = f"{len(record.metrics)} of {summary.steps or len(record.metrics)} steps"
    tiles = "".join(map(_tile, changes(summary.figures or {}, record.metrics)))
    command = f"<h2>Go on from here</h2><pre>{escape(encodable(summary.next_command))}</pre>"
    config = f"<details><summary>Show</summary><pre>{escape(record.config)}</pre></details>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<title>PPO run {name}</title><style>{STYLE}</style></head><body>"
        f"<h1>PPO run {name}</h1><p>{done}, {escape(summary.state)}</p><br>"
        f'<div class="tiles">{tiles}</div>'
        + _pairs(summary.before, summary.after)
        + _curves(record.metrics)
        + _training_samples(record.samples)
        + _models(summary.models)
        + (f"<h2>Settings</h2>{config}" if record.config else "")
        + (command if summary.next_command else "")
        + "</body></html>\n"
    )


def write_page(run_dir: Path) -> Path:
    """Write `report.html` and `curves.png` from the files of a run; return the page's path."""
    record = read_run(run_dir)
    write_curves(run_dir / CURVES, record.name, record.metrics)
    target = run_dir / PAGE
    target.write_text(page(record), encoding="utf-8")
    return target
