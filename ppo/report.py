"""What a person sees of a run: tables, a progress line, samples, and a page at the end.

`python -m ppo.report RUN` prints the figures of a run folder and rebuilds its page.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ppo.report_figures import clock, number, sparkline
from ppo.report_files import (
    METRICS,
    SAMPLES,
    ModelRow,
    Sample,
    Summary,
    append_lines,
    keep_lines,
    read_run,
    write_summary,
)
from ppo.report_page import write_page
from ppo.report_tables import Printer

__all__ = ["ModelRow", "Report", "Sample", "main", "write_page"]

# Name, metric, decimals, width of the column.
COLUMNS = (
    ("score", "objective/scores", 3, 10),
    ("KL", "objective/kl", 3, 10),
    ("policy loss", "loss/policy_avg", 4, 13),
    ("value loss", "loss/value_avg", 4, 12),
    ("length", "tokens/response_length_mean", 1, 8),
)


class _Bar(Progress):
    """The bar with a line of figures above it."""

    figures = Text("")

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.figures
        yield from super().get_renderables()


class Report:
    """Show a run while it trains and leave its files in `run_dir`.

    Args:
        run_dir: folder of the run, made if it does not exist.
        steps: how many steps are planned.
        console: where to print; standard output if None. On a terminal there is a live bar,
            elsewhere one plain line a step.
        done: steps that the run has behind it; what its files say of later ones is cut off.
    """

    def __init__(
        self, run_dir: Path, steps: int, *, console: Console | None = None, done: int = 0
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.console = console or Console()
        self.printer = Printer(self.console)
        self.summary = Summary(steps=steps)
        self.metrics: list[dict[str, float]] = []
        if done:
            for name in (METRICS, SAMPLES):
                keep_lines(run_dir / name, done)
            record = read_run(run_dir)
            self.metrics = record.metrics
            self.summary = replace(record.summary, steps=steps, state="running")
        self.seconds: list[float] = []
        self.last = time.monotonic()
        self.lines_below_header: int | None = None
        self.bar: _Bar | None = None

    def __enter__(self) -> Report:
        write_summary(self.run_dir, self.summary)
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self.bar = _Bar(
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[pace]}", markup=False),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                console=self.console,
                expand=True,
                refresh_per_second=4,
            )
            self.task = self.bar.add_task(
                "", total=self.summary.steps, completed=len(self.metrics), pace="first step"
            )
            self.bar.start()
        self.last = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
        if kind is not None:
            write_summary(self.run_dir, replace(self.summary, state="stopped by an error"))
            if self.metrics:
                self.printer.line(f"stopped; what there is: python -m ppo.report {self.run_dir}")

    def models(self, rows: Sequence[ModelRow]) -> None:
        """Print who is who among the models."""
        self.summary = replace(self.summary, models=tuple(rows))
        write_summary(self.run_dir, self.summary)
        self.printer.models(rows)

    def before(self, figures: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Keep what held-out prompts gave before training; a resumed run has it in its file."""
        named = {f"{name} before": figure for name, figure in figures.items()}
        self.summary = replace(self.summary, figures=named, before=tuple(samples))
        write_summary(self.run_dir, self.summary)

    def note(self, text: str) -> None:
        """Print a line."""
        self.printer.line(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step to `metrics.jsonl` and show the most telling ones."""
        row = {"step": step, **{key: float(value) for key, value in metrics.items()}}
        append_lines(self.run_dir / METRICS, [row])
        self.metrics.append(row)
        # The trainer's own figure leaves out held-out sampling, which the clock does not.
        now, seconds = time.monotonic(), row.get("time/step", math.nan)
        self.seconds.append(seconds if math.isfinite(seconds) else now - self.last)
        self.last = now
        recent = self.seconds[-10:]
        pace = sum(recent) / len(recent)
        left = clock(pace * (self.summary.steps - len(self.metrics)))
        if self.bar:
            self._move_bar(row, f"{pace:.2f} s/step, {left} left")
        else:
            self._plain_step(row, f"{pace:.2f}", left)

    def _move_bar(self, row: dict[str, float], pace: str) -> None:
        parts = [f"{name} {number(row.get(key), digits)}" for name, key, digits, _ in COLUMNS]
        if self.console.width >= 110 and not self.console.options.ascii_only:
            scores = [each.get("objective/scores", math.nan) for each in self.metrics]
            parts[0] += f" {sparkline(scores, 16)}"
        if self.bar:
            self.bar.figures = self.printer.encode("   ".join(parts))
            self.bar.update(self.task, advance=1, pace=pace)

    def _plain_step(self, row: dict[str, float], pace: str, left: str) -> None:
        """One aligned line, with the names above every 20 lines and after a table."""
        names, cells = f"{'step':>5}", f"{row['step']:>5.0f}"
        for name, key, digits, width in COLUMNS:
            names += f"{name:>{width}}"
            cells += f"{number(row.get(key), digits):>{width}}"
        if self.lines_below_header is None or self.lines_below_header == 20:
            self.printer.line(f"{names}{'s/step':>8}{'left':>9}")
            self.lines_below_header = 0
        self.printer.line(f"{cells}{pace:>8}{left:>9}")
        self.lines_below_header += 1

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Append samples to `samples.jsonl` and print the first few of them."""
        append_lines(
            self.run_dir / SAMPLES,
            [
                {"step": step, "prompt": row.prompt, "response": row.response, "score": row.score}
                for row in rows
            ],
        )
        self.printer.samples(f"step {step}", rows)
        self.lines_below_header = None

    def finish(
        self, figures: Mapping[str, float], samples: Sequence[Sample], next_command: str
    ) -> None:
        """Print the outcome and write the page.

        Args:
            figures: of held-out prompts after training; shown beside those of `before`.
            samples: of the same prompts, in the same order.
            next_command: the command that trains on.
        """
        named = {f"{name} after": figure for name, figure in figures.items()}
        self.summary = replace(
            self.summary,
            state="finished",
            figures={**(self.summary.figures or {}), **named},
            after=tuple(samples),
        )
        self._end(next_command)

    def interrupted(self, next_command: str) -> None:
        """Say what was saved and how to go on, and write the page from what there is."""
        self.summary = replace(self.summary, state="interrupted")
        self._stop()
        self.printer.line(f"interrupted after {len(self.metrics)} of {self.summary.steps} steps")
        self._end(next_command)

    def _end(self, next_command: str) -> None:
        self._stop()
        self.summary = replace(self.summary, next_command=next_command)
        write_summary(self.run_dir, self.summary)
        self.printer.outcome(self.summary, self.metrics)
        try:
            write_page(self.run_dir)
        except OSError as error:
            self.printer.line(f"no page: {error}")
        self.printer.contents(self.run_dir)
        self.printer.line(f"\ngo on:  {next_command}")

    def _stop(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures of a run folder and rebuild its page."""
    parser = argparse.ArgumentParser(prog="python -m ppo.report", description=main.__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    run_dir = parser.parse_args(argv).run
    if not (run_dir / METRICS).is_file():
        print(f"error: {run_dir} holds no {METRICS}: not the folder of a run", file=sys.stderr)
        return 2
    record, printer = read_run(run_dir), Printer(Console())
    printer.outcome(record.summary, record.metrics)
    printer.line(f"\npage: {write_page(run_dir)}")
    if record.summary.next_command:
        printer.line(f"go on:  {record.summary.next_command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
