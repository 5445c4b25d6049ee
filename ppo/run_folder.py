"""Run folders: one for each run, with its settings and the models that trained."""

from __future__ import annotations

import shlex
import shutil
from datetime import datetime
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ppo.checkpoint import newest_checkpoint
from ppo.config import Config, InputError, parse_args, settings, to_yaml
from ppo.critic import Critic
from ppo.models import Models
from ppo.policy import Policy

CONFIG = "config.yaml"
# What a resumed run may change: none of it moves a parameter that was or will be trained alike.
FREE = (
    "steps",
    "output_dir",
    "resume",
    "checkpoint_every",
    "keep_last",
    "sample_every",
    "threads",
    "judge",
    "eval_prompts",
    "reward_timeout",
    "reward_retries",
    "skip_bad_steps",
)


def new_run_dir(config: Config) -> Path:
    """Make `OUTPUT_DIR/YYYYmmdd-HHMMSS`, numbered if it exists, holding the resolved config."""
    base = Path(config.output_dir) / datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir, number = base, 1
    while True:
        try:
            run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
            run_dir = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise InputError(f"output_dir: cannot make {run_dir}: {error.strerror}") from None
    (run_dir / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    return run_dir


def open_run(config: Config) -> tuple[Path, Path | None]:
    """Find the run to go on with, or make a new one; returns it and its newest whole checkpoint.

    `resume` is a run folder, or "auto": the newest run in `output_dir` with these settings that has
    a checkpoint and steps left; a new run where there is none.

    Raises:
        InputError: the folder holds no run, no whole checkpoint, or one of other settings.
    """
    if config.resume is None:
        return new_run_dir(config), None
    if config.resume != "auto":
        run_dir = Path(config.resume)
        differing = differences(run_dir, config)
        if differing:
            raise InputError(f"resume: {run_dir} was made with other settings: {differing[0]}")
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is None:
            raise InputError(f"resume: {run_dir} holds no checkpoint")
        return run_dir, checkpoint
    for run_dir in sorted(Path(config.output_dir).glob("*/"), reverse=True):
        if not (run_dir / CONFIG).is_file() or differences(run_dir, config):
            continue
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is not None and int(checkpoint.name.rpartition("-")[2]) < config.steps:
            return run_dir, checkpoint
    return new_run_dir(config), None


def differences(run_dir: Path, config: Config) -> list[str]:
    """What this run's settings have otherwise, beyond those that may change."""
    if not (run_dir / CONFIG).is_file():
        raise InputError(f"resume: {run_dir} is not the folder of a run (it has no {CONFIG})")
    saved = parse_args(["--config", str(run_dir / CONFIG)])
    found = []
    for key in settings():
        section, _, name = key.rpartition(".")
        before, now = (
            getattr(getattr(each, section) if section else each, name) for each in (saved, config)
        )
        if before != now and key not in FREE:
            found.append(f"{key} is {before!r} there, got {now!r}")
    return found


def save_models(run_dir: Path, models: Models) -> None:
    """Write `actor/` and `critic/`, each whole before it takes the place of an older one."""
    _replace(run_dir, "actor", models.actor, models.tokenizer)
    if models.critic is not None:
        _replace(run_dir, "critic", models.critic, models.tokenizer)


def _replace(
    run_dir: Path, name: str, model: Policy | Critic, tokenizer: PreTrainedTokenizerBase
) -> None:
    partial, target, old = (run_dir / each for each in (f".{name}.partial", name, f".{name}.old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def resume_command(run_dir: Path, steps: int | None = None) -> str:
    """The command that goes on where the run stands, as if it had never stopped."""
    command = ["python", "-m", "ppo.train", "--resume", str(run_dir)]
    return shlex.join([*command, *(["--steps", str(steps)] if steps else [])])
