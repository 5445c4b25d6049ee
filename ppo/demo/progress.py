"""What a person sees while the demo is built: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from ppo.supervised import StepHook


class BuildProgress:
    """Print one line per finished stage, and a live bar for the stage at work."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator[StepHook]:
        """Follow a stage of `steps` optimiser steps; gives the function to call after each."""
        if not self.console.is_terminal:
            self.say(f"{name}: {steps} steps ...")
            yield lambda step, loss: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(name, total=steps, loss="-")

            def on_step(step: int, loss: Tensor) -> None:
                bar.update(task, completed=step, loss=f"{loss.item():.2f}")

            yield on_step
