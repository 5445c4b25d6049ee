"""Checkpoints: everything that a run is, whole or not at all.

`RUN/checkpoints/step-N/` holds what trains and its optimisers (torch.distributed.checkpoint, which
another number of processes can read), `state.json` with the counters, `rank-R.pt` with the random
numbers of each process, and `manifest.json` with the size and CRC-32 of every file. The folder gets
its name when all of that is on disk; one with a file missing, cut or changed is not used.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ppo.learner import Learner
from ppo.reward_shaping import RunningScores
from ppo.schema import InputError
from ppo.trainer import Trainer

FOLDER, MANIFEST, STATE = "checkpoints", "manifest.json", "state.json"


def random_state(trainer: Trainer) -> dict[str, Any]:
    """Every random number generator of this process, as tensors and lists."""
    kind, keys, *rest = cast(Any, numpy.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "minibatches": trainer.generator.get_state(),
        "examples": trainer.examples.generator.get_state() if trainer.examples else None,
    }


def set_random_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Put every generator back to where it was."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    trainer.generator.set_state(state["minibatches"])
    if trainer.examples is not None and state["examples"] is not None:
        trainer.examples.generator.set_state(state["examples"])


def counters(trainer: Trainer) -> dict[str, Any]:
    """What moves from step to step beside models, optimisers and random numbers."""
    return {
        "rollouts": trainer.state.rollouts,
        "kl_coef": trainer.state.kl.kl_coef,
        "scores": asdict(trainer.state.scores),
        "schedules": {name: each.scheduler.last_epoch for name, each in _learners(trainer)},
    }


def save_checkpoint(
    run_dir: Path, trainer: Trainer, rng: dict[str, Any], state: dict[str, Any], keep_last: int
) -> Path:
    """Write the checkpoint of the step that `state` counts, and remove the oldest ones.

    Args:
        run_dir: of the run.
        trainer: its models and optimisers are saved as they are.
        rng: `random_state` at the same moment.
        state: `counters` at the same moment.
        keep_last: how many checkpoints stay.

    Raises:
        InputError: the disk is full or the folder not writable; older checkpoints stay.
    """
    folder = run_dir / FOLDER
    final = folder / f"step-{state['rollouts']:08d}"
    partial = folder / f".{final.name}.partial"
    main, accelerator = trainer.accelerator.is_main_process, trainer.accelerator
    try:
        if main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        with _alone():
            save(_tensors(trainer), checkpoint_id=partial, no_dist=accelerator.num_processes == 1)
        torch.save(rng, partial / f"rank-{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if main:
            _finish(partial, final, state)
            for old in sorted(folder.glob("step-*"))[:-keep_last]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(
            f"cannot write the checkpoint {final}: {error.strerror or error}; older ones stay"
        ) from error
    return final


@contextmanager
def _alone() -> Iterator[None]:
    """One process is meant; torch.distributed.checkpoint warns of it all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _finish(partial: Path, final: Path, state: dict[str, Any]) -> None:
    (partial / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    sums = {str(path.relative_to(partial)): [path.stat().st_size, _crc(path)] for path in files}
    (partial / MANIFEST).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
    for path in [*files, partial / MANIFEST, partial]:
        _to_disk(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _to_disk(final.parent)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint that is whole; those that are not are passed over.

    Raises:
        InputError: there are checkpoints, and none of them is whole.
    """
    found = sorted((run_dir / FOLDER).glob("step-*"), reverse=True)
    reasons = []
    for path in found:
        reason = damage(path)
        if reason is None:
            return path
        reasons.append(f"{path.name}: {reason}")
    if reasons:
        raise InputError(f"resume: no checkpoint of {run_dir} is whole ({'; '.join(reasons)})")
    return None


def passed_over(checkpoint: Path) -> Iterator[str]:
    """What is wrong with each checkpoint that is newer than this one, a line for each."""
    for path in sorted(checkpoint.parent.glob("step-*")):
        if path.name > checkpoint.name:
            yield f"{path} was passed over: {damage(path)}"


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None: nothing."""
    try:
        sums = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, crc) in sums.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} is cut or grown"
            if _crc(file) != crc:
                return f"{name} has changed"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or broken"
    return None if STATE in sums else f"{STATE} is missing"


def load_checkpoint(path: Path, trainer: Trainer) -> int:
    """Put a fresh trainer where the checkpoint was taken; returns how many steps are done.

    Raises:
        InputError: it does not fit these models.
    """
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    tensors = _tensors(trainer)
    try:
        with _alone():
            load(tensors, checkpoint_id=path, no_dist=trainer.accelerator.num_processes == 1)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"resume: {path} does not fit these models: {reason}") from error
    for name, learner in _learners(trainer):
        set_optimizer_state_dict(
            learner.model, learner.optimizer, optim_state_dict=tensors[name]["optimizer"]
        )
        learner.scheduler.last_epoch = state["schedules"][name]
        learner.scheduler._last_lr = [group["lr"] for group in learner.optimizer.param_groups]
    own = path / f"rank-{trainer.accelerator.process_index}.pt"
    if own.is_file():  # more processes than before: the new ones keep their fresh seeds
        set_random_state(trainer, torch.load(own, weights_only=True))
    trainer.state.rollouts = int(state["rollouts"])
    trainer.state.kl = replace(trainer.state.kl, kl_coef=float(state["kl_coef"]))
    trainer.state.scores = RunningScores(**state["scores"])
    return trainer.state.rollouts


def _learners(trainer: Trainer) -> Iterator[tuple[str, Learner]]:
    yield "actor", trainer.actor
    if trainer.critic is not None:
        yield "critic", trainer.critic


def _tensors(trainer: Trainer) -> dict[str, Any]:
    """What trains and its optimisers, by name; loading writes into these very tensors."""
    tensors: dict[str, Any] = {}
    for name, learner in _learners(trainer):
        trained = {id(parameter) for parameter in learner.parameters}
        weights = {
            key: parameter.detach()
            for key, parameter in learner.model.named_parameters()
            if id(parameter) in trained
        }
        tensors[name] = {
            "weights": weights,
            "optimizer": get_optimizer_state_dict(learner.model, learner.optimizer),
        }
    return tensors
