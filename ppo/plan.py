"""`python -m ppo.plan`: memory and time of a run, calculated before anything is loaded.

The same options as `ppo.train`, and a few about the machine. Nothing but each model's `config.json`
is read. All figures are predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ppo.config import Config, parse_args
from ppo.plan_memory import (
    Batch,
    Held,
    Machine,
    Phase,
    batch_of,
    full_logits,
    fused_head,
    generates_whole,
    held,
    largest_micro_batch,
    phases,
)
from ppo.plan_models import roles, size_of
from ppo.plan_time import Speed, phase_seconds
from ppo.schema import InputError

GB = 1e9


@dataclass(frozen=True)
class Plan:
    """Everything that is shown; bytes and seconds, on each GPU."""

    machine: Machine
    batch: Batch
    parameters: dict[str, int]
    held: list[Held]
    phases: list[Phase]
    seconds: dict[str, float]
    logits_full: int
    logits_fused: int
    actor_whole: bool
    largest_micro_batch: int | None

    @property
    def peak(self) -> Phase:
        """The phase that needs the most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether every phase fits into a GPU."""
        return self.peak.total <= self.machine.gpu_memory


def make_plan(config: Config, machine: Machine | None = None, speed: Speed | None = None) -> Plan:
    """Calculate a run's memory and time; `ppo.train --dry-run` shows it too.

    Raises:
        InputError: the actor is not named, or a model's `config.json` cannot be read.
    """
    machine, speed = machine or Machine(), speed or Speed()
    found = roles(config)
    batch, size, actor = batch_of(config, machine), size_of(config.dtype), found[0].shape
    rows = batch.micro * batch.response
    trained = config.models.sharing != "lora"
    return Plan(
        machine=machine,
        batch=batch,
        parameters={role.name: role.held for role in found},
        held=held(config, machine, found),
        phases=phases(config, machine, found),
        seconds=phase_seconds(config, machine, speed, found),
        logits_full=full_logits(rows, actor, size, backward=True, trained=trained),
        logits_fused=fused_head(rows, actor, size, backward=True, trained=trained),
        actor_whole=generates_whole(config, machine, found),
        largest_micro_batch=largest_micro_batch(config, machine, found),
    )


def show(plan: Plan, console: Console) -> None:
    """Print a plan as tables."""
    machine, batch = plan.machine, plan.batch
    how = "" if machine.gpus == 1 else f", {machine.strategy}"
    console.print(
        f"predicted, not measured, on each of {machine.gpus} x {machine.gpu_memory / GB:g} GB"
        f"{how}: "
        f"{batch.responses} responses of {batch.prompt} + {batch.response} tokens, minibatches of "
        f"{batch.minibatch}, micro-batches of {batch.micro}"
    )
    console.print(_held_table(plan))
    console.print(_phase_table(plan))
    console.print(
        f"LM head in an update: {_gb(plan.logits_fused)} GB fused, "
        f"{_gb(plan.logits_full)} GB with full logits"
    )
    console.print(verdict(plan))


def verdict(plan: Plan) -> str:
    """Say whether it fits, and what to lower where it does not."""
    peak, limit = plan.peak, plan.machine.gpu_memory
    best = plan.largest_micro_batch
    if plan.fits:
        return (
            f"fits: {peak.name} needs {_gb(peak.total)} of {limit / GB:g} GB; the largest "
            f"ppo.micro_batch_size that fits is {best}"
        )
    if peak.held > limit:
        advice = "models and optimiser alone do not: models.sharing lora, sharding or more GPUs"
    elif best is not None:
        advice = f"ppo.micro_batch_size {best} fits"
    elif peak.name == "generate":
        advice = "lower rollout.batch_size or rollout.max_new_tokens, or use more GPUs"
    else:
        advice = "no ppo.micro_batch_size fits: models.sharing lora, sharding or more GPUs"
    return f"does not fit: {peak.name} needs {_gb(peak.total)} of {limit / GB:g} GB; {advice}"


def _held_table(plan: Plan) -> Table:
    table = Table(box=box.HORIZONTALS, title="held, GB", title_justify="left")
    for name in ("role", "parameters", "weights", "gradients", "AdamW"):
        table.add_column(name, justify="left" if name == "role" else "right")
    for part in plan.held:
        cells = (part.parameters, part.gradients, part.optimiser)
        count = f"{plan.parameters[part.role]:,}"
        table.add_row(part.role, count, *(_gb(each) for each in cells))
    return table


def _phase_table(plan: Plan) -> Table:
    table = Table(box=box.HORIZONTALS, title="peak by phase, GB", title_justify="left")
    names = ("phase", "held", "gradients", "gathered", "working", "head", "sum", "seconds")
    for name in names:
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in plan.phases:
        cells = (phase.held, phase.gradients, phase.gathered, phase.working, phase.head)
        seconds = plan.seconds.get(phase.name.split()[0])
        first = phase.name in ("generate", "score", "update actor")
        clock = f"{seconds:.1f}" if seconds is not None and first else ""
        table.add_row(phase.name, *(_gb(each) for each in (*cells, phase.total)), clock)
    return table


def _gb(size: float) -> str:
    number = size / GB
    return f"{number:.1f}" if number >= 0.05 or number == 0 else f"{number:.2g}"


HEADER = (
    "model", "GPUs", "held", "generate", "update", "head fused / full", "peak", "largest micro",
    "generate s", "score s", "update s",
)  # fmt: skip


def markdown(plan: Plan, name: str) -> list[str]:
    """Write a plan as a table of one row, as `docs/scaling.md` has them."""
    by_phase = {phase.name: phase for phase in plan.phases}
    cells = [
        name,
        plan.machine.gpus,
        _gb(by_phase["score"].held),
        _gb(by_phase["generate"].total) + ("" if plan.actor_whole else " by layer"),
        _gb(max(phase.total for name, phase in by_phase.items() if name.startswith("update"))),
        f"{_gb(plan.logits_fused)} / {_gb(plan.logits_full)}",
        _gb(plan.peak.total) + ("" if plan.fits else ", does not fit"),
        plan.largest_micro_batch or "none",
        *(f"{plan.seconds[phase]:.1f}" for phase in ("generate", "score", "update")),
    ]
    rows = (HEADER, ["---"] * len(HEADER), cells)
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


def as_json(plan: Plan) -> str:
    """Write every figure as JSON."""
    tree = asdict(plan) | {"fits": plan.fits, "peak": plan.peak.total}
    return json.dumps(tree, indent=1)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the machine's options; the rest are those of `ppo.train`."""
    parser = argparse.ArgumentParser(
        prog="python -m ppo.plan",
        usage="python -m ppo.plan [--config FILE] [--KEY VALUE ...] [--gpus N] [machine options]",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs, default 1")
    parser.add_argument("--gpu-memory", type=float, default=80.0, help="10^9 bytes each")
    parser.add_argument(
        "--strategy",
        choices=("ddp", "fsdp2", "zero3"),
        default="ddp",
        help="how GPUs share weights, gradients and optimiser",
    )
    parser.add_argument(
        "--master-weights", action="store_true", help="float32 copies beside bfloat16 weights"
    )
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of a GPU in bfloat16")
    parser.add_argument("--bandwidth", type=float, default=3350.0, help="its memory, GB/s")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s a GPU between nodes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a table of one row")
    return parser


def read_options(argv: Sequence[str]) -> tuple[Config, Machine, Speed, str]:
    """Read the command line.

    Raises:
        InputError: an option of the machine or a setting of the run is wrong.
    """
    options, rest = make_parser().parse_known_args(argv)
    for name in ("gpus", "gpu_memory", "tflops", "bandwidth", "link"):
        value = getattr(options, name)
        if not 0 < value < float("inf"):
            raise InputError(f"{name} must be positive, got {value}")
    machine = Machine(
        gpus=options.gpus,
        gpu_memory=options.gpu_memory * GB,
        strategy=options.strategy,
        master_weights=options.master_weights,
    )
    speed = Speed(
        flops=options.tflops * 1e12,
        memory_bandwidth=options.bandwidth * GB,
        net_link=options.link * GB,
    )
    form = "json" if options.json else "markdown" if options.markdown else "tables"
    return parse_args(rest), machine, speed, form


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    try:
        config, machine, speed, form = read_options(sys.argv[1:] if argv is None else argv)
        plan = make_plan(config, machine, speed)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if form == "json":
        print(as_json(plan))
    elif form == "markdown":
        print("\n".join(markdown(plan, Path(str(config.actor)).name)))
    else:
        show(plan, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
