"""Run folders: one for each run, with the models that trained."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo.config import Config, InputError, to_yaml
from ppo.models import Critic


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
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return run_dir


def save_models(
    run_dir: Path, actor: PreTrainedModel, critic: Critic | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write `actor/` and `critic/`, each whole before it takes the place of an older one."""
    for name, model in (("actor", actor), ("critic", critic)):
        if model is None:
            continue
        partial = run_dir / f".{name}.partial"
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        target = run_dir / name
        if target.exists():
            target.rename(run_dir / f"{name}.previous")
        partial.rename(target)


def go_on_command(run_dir: Path, steps: int) -> str:
    """The command that trains on from the saved models (fresh optimisers)."""
    command = ["python", "-m", "ppo.train", "--config", str(run_dir / "config.yaml")]
    for name in ("actor", "critic"):
        if (run_dir / name).is_dir():
            command += [f"--{name}", str(run_dir / name)]
    return shlex.join([*command, "--steps", str(steps)])
