"""A run that was stopped goes on as if it never had been; what is broken is refused."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo.checkpoint import damage, newest_checkpoint
from ppo.config import InputError
from ppo.train import main

SETTINGS = {
    "rollout.batch_size": 4,
    "rollout.max_new_tokens": 5,
    "ppo.kl_controller": "proportional",
    "ppo.kl_horizon": 50,
    "ppo.score_normalization": "running",
    "optim.lr_schedule": "cosine",
    "checkpoint_every": 1,
    "threads": 1,
}


def flags(folders: dict[str, str], out: Path, **changes: object) -> list[str]:
    settings = {**folders, **SETTINGS, "output_dir": out, "steps": 5, **changes}
    return [f"--{key}={value}" for key, value in settings.items()]


def only_run(out: Path) -> Path:
    (run,) = out.iterdir()
    return run


def lines(run: Path) -> list[dict[str, float]]:
    """The metrics file without what a clock or the machine says."""
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "perf/"))}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def same_models(a: Path, b: Path) -> bool:
    models = [AutoModelForCausalLM.from_pretrained(run / "actor") for run in (a, b)]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


SHARING = ("separate", "trunk", "lora")


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped(
    folders: dict[str, str], tmp_path: Path, sharing: str
) -> None:
    shared = {"models.sharing": sharing, "optim.lr_schedule": "constant"}
    assert main(flags(folders, tmp_path / "whole", **shared)) == 0
    assert main(flags(folders, tmp_path / "parts", **shared, steps=2)) == 0
    run, whole = only_run(tmp_path / "parts"), only_run(tmp_path / "whole")
    assert main(["--resume", str(run), "--steps", "5"]) == 0
    assert lines(run) == lines(whole)
    assert same_models(run, whole)


def test_a_run_killed_at_random_moments_ends_as_one_never_stopped(
    folders: dict[str, str], tmp_path: Path
) -> None:
    assert main(flags(folders, tmp_path / "whole", steps=12)) == 0
    command = [sys.executable, "-m", "ppo.train", *flags(folders, tmp_path / "killed", steps=12)]
    draw = random.Random(0)
    for _ in range(4):
        process = subprocess.Popen(
            [*command, "--resume=auto"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        seen = sum(len(list(run.glob("checkpoints/step-*"))) for run in _runs(tmp_path / "killed"))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
            now = [p for run in _runs(tmp_path / "killed") for p in run.glob("checkpoints/step-*")]
            if len(now) > seen or (now and max(p.stat().st_mtime for p in now) > time.time() - 0.5):
                break
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert main([*flags(folders, tmp_path / "killed", steps=12), "--resume=auto"]) == 0
    whole, killed = only_run(tmp_path / "whole"), _runs(tmp_path / "killed")[-1]
    assert lines(killed) == lines(whole)
    assert same_models(whole, killed)


def _runs(out: Path) -> list[Path]:
    return sorted(out.iterdir()) if out.is_dir() else []


@pytest.fixture
def run(folders: dict[str, str], tmp_path: Path) -> Path:
    assert main(flags(folders, tmp_path / "runs", steps=2)) == 0
    return only_run(tmp_path / "runs")


def test_any_file_missing_cut_or_flipped_is_noticed(run: Path) -> None:
    newest = newest_checkpoint(run)
    assert newest is not None
    assert newest.name == "step-00000002"
    for file in sorted(path for path in newest.iterdir() if path.is_file()):
        kept = file.read_bytes()
        file.unlink()
        assert damage(newest) is not None, file
        file.write_bytes(kept[:-2])
        assert damage(newest) is not None, file
        file.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
        assert damage(newest) is not None, file
        assert newest_checkpoint(run).name == "step-00000001"  # type: ignore[union-attr]
        file.write_bytes(kept)
        assert damage(newest) is None


def test_going_on_from_an_older_checkpoint_says_what_is_wrong_with_the_newer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-00000002" / "state.json").unlink()
    assert main(["--resume", str(run), "--steps", "2"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "step-00000001" in shown
    assert "step-00000002waspassedover:state.jsonismissing" in shown


def test_only_broken_checkpoints_are_an_error_that_says_so(run: Path) -> None:
    for folder in (run / "checkpoints").iterdir():
        (folder / "state.json").unlink()
    with pytest.raises(InputError, match=r"no checkpoint of .* is whole \(step-00000002: state"):
        newest_checkpoint(run)


def test_a_killed_save_leaves_nothing_that_looks_whole(run: Path) -> None:
    whole = run / "checkpoints" / "step-00000002"
    whole.rename(run / "checkpoints" / ".step-00000003.partial")
    newest = newest_checkpoint(run)
    assert newest is not None
    assert newest.name == "step-00000001"


def test_other_settings_are_refused_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--resume", str(run), "--ppo.gamma", "0.5"]) == 2
    assert "other settings: ppo.gamma is 1.0 there, got 0.5" in capsys.readouterr().err
    assert main(["--resume", str(run.parent)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_keep_last_bounds_the_checkpoints(folders: dict[str, str], tmp_path: Path) -> None:
    assert main(flags(folders, tmp_path / "runs", keep_last=3)) == 0
    kept = sorted(path.name for path in (only_run(tmp_path / "runs") / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000004", "step-00000005"]
