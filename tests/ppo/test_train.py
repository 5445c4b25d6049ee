"""The command line on tiny models: what a person sees, what a run leaves, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo.train import main

Flags = Callable[..., list[str]]


@pytest.fixture
def flags(folders: dict[str, str], tmp_path: Path) -> Flags:
    """The flags of a short run on the tiny models, with changes."""

    def build(**changes: object) -> list[str]:
        settings: dict[str, object] = {
            **folders,
            "output_dir": tmp_path / "runs",
            "steps": 2,
            "rollout.batch_size": 4,
            "rollout.max_new_tokens": 5,
        }
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        return [f"--{key}={value}" for key, value in settings.items()]

    return build


def only_run(tmp_path: Path) -> Path:
    (run,) = (tmp_path / "runs").iterdir()
    return run


def test_a_run_leaves_config_metrics_actor_and_report(flags: Flags, tmp_path: Path) -> None:
    assert main(flags(eval_prompts=tmp_path / "prompts.jsonl")) == 0
    run = only_run(tmp_path)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert lines[1]["objective/kl"] != 0.0
    assert lines[0]["episode"] == 4
    assert {path.name for path in run.iterdir()} >= {
        "actor",
        "critic",
        "config.yaml",
        "curves.png",
        "report.html",
    }
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    trained = AutoModelForCausalLM.from_pretrained(run / "actor")
    assert len(AutoTokenizer.from_pretrained(run / "actor")) == 64
    moved = [
        not torch.equal(a, b) for a, b in zip(start.parameters(), trained.parameters(), strict=True)
    ]
    assert all(moved)


def test_a_seed_fixes_everything(flags: Flags, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main(flags(output_dir=tmp_path / name)) == 0
    runs = [next((tmp_path / name).iterdir()) for name in ("a", "b")]
    found, again = (
        [
            {key: v for key, v in json.loads(line).items() if not key.startswith(("time", "perf"))}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in runs
    )
    assert found == again


def test_the_saved_models_train_on(flags: Flags, tmp_path: Path) -> None:
    assert main(flags(steps=1)) == 0
    run = only_run(tmp_path)
    command = f"--config {run}/config.yaml --actor {run}/actor --critic {run}/critic --steps 1"
    assert main([*command.split(), "--output-dir", str(tmp_path / "more")]) == 0
    (more,) = (tmp_path / "more").iterdir()
    (line,) = (more / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["objective/kl"] != 0.0  # the reference is still the first actor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"prompt_column": "text"}, "text"),
        ({"actor": "./nowhere"}, "actor: no such folder: ./nowhere"),
        ({"ppo.cliprnage": 0.1}, "ppo.cliprange"),
        ({"ppo.gamma": "high"}, "ppo.gamma"),
        ({"ppo.num_minibatches": 9}, "num_minibatches"),
        ({"rollout.max_prompt_tokens": 2}, "limit"),
        ({"judge": "no_such:thing"}, "judge"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    flags: Flags,
    changes: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert main(flags(**changes)) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "runs").exists()


def test_long_prompts_are_counted_when_dropped(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "w5 w5 w5 w5 w5 w5 w5 w5 w5"}\n')
    settings = {"rollout.max_prompt_tokens": 6, "rollout.long_prompts": "drop", "steps": 1}
    assert main(flags(**settings)) == 0
    assert "1 prompts left out: longer than 6 tokens" in capsys.readouterr().out


def test_ctrl_c_saves_and_says_how_to_go_on(flags: Flags, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ppo.train", *flags(steps=100000, threads=1)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "runs").glob("*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    run = only_run(tmp_path)
    assert f"--resume {run}" in " ".join(out.split())
    assert len(list((run / "checkpoints").glob("step-*"))) == 1
    AutoModelForCausalLM.from_pretrained(run / "actor")
    assert (run / "report.html").is_file()


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_controller_moves_beta_by_the_measured_kl(flags: Flags, tmp_path: Path) -> None:
    settings = {"ppo.kl_controller": "proportional", "ppo.kl_target": 1e-6, "ppo.kl_horizon": 40}
    assert main(flags(**settings, steps=3, **{"ppo.kl_coef": 0.5})) == 0
    lines = metrics_of(only_run(tmp_path))
    # step 0: KL 0, error clipped to -0.2; then far above the target, clipped to +0.2; n/horizon 0.1
    expected = [0.5, 0.5 * (1 - 0.02), 0.5 * (1 - 0.02) * (1 + 0.02)]
    assert abs(lines[0]["objective/kl"]) < 1e-6 or lines[0]["objective/kl"] < 0
    assert [line["objective/kl_coef"] for line in lines] == pytest.approx(expected)


def test_scores_are_shaped_in_order_and_only_for_training(flags: Flags, tmp_path: Path) -> None:
    settings = {"ppo.score_normalization": "batch", "ppo.missing_eos_penalty": 2.0}
    assert main(flags(**settings, steps=1)) == 0
    (line,) = metrics_of(only_run(tmp_path))
    penalty = 2.0 * line["tokens/truncated_frac"]  # the normalised scores have mean 0
    assert line["objective/shaped_scores"] == pytest.approx(-penalty, abs=1e-5)
    assert line["objective/scores"] != pytest.approx(0.0, abs=1e-3)
    expected = line["objective/shaped_scores"] + line["objective/non_score_reward"]
    assert line["objective/rlhf_reward"] == pytest.approx(expected)


def test_the_learning_rate_falls_over_the_runs_steps(flags: Flags, tmp_path: Path) -> None:
    assert main(flags(steps=2, **{"optim.lr_schedule": "linear", "optim.actor_lr": 0.008})) == 0
    rates = [line["lr"] for line in metrics_of(only_run(tmp_path))]
    assert rates == pytest.approx([0.008, 0.004])  # 4 of 8 steps later half is left


def test_an_early_stop_says_in_which_epoch(
    flags: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(steps=1, **{"ppo.target_kl": 1e-9, "optim.actor_lr": 0.1})) == 0
    (line,) = metrics_of(only_run(tmp_path))
    assert line["policy/updates"] == 1
    assert "updates stopped in epoch 1 after 1 steps" in " ".join(capsys.readouterr().out.split())


def test_a_score_that_is_no_number_names_the_sample_and_saves_the_models(
    flags: Flags,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    monkeypatch.setattr("ppo.scoring.score_tokens", lambda *_: broken)
    assert main(flags()) == 2
    expected = "reward 'model' must be finite, got nan for sample 2 of the batch"
    assert capsys.readouterr().err == f"error: {expected}\n"
    AutoModelForCausalLM.from_pretrained(only_run(tmp_path) / "actor")


@pytest.mark.parametrize("estimator", ["reinforce_pp", "rloo", "grpo"])
def test_estimators_without_a_critic_build_none(
    flags: Flags, tmp_path: Path, estimator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"ppo.advantage_estimator": estimator, "rollout.samples_per_prompt": 2}
    assert main(flags(**settings, steps=2)) == 0
    run = only_run(tmp_path)
    lines = metrics_of(run)
    assert not (run / "critic").exists()
    assert "--critic" not in capsys.readouterr().out
    assert not {"loss/value_avg", "val/explained_variance", "value/grad_norm"} & lines[0].keys()
    assert [line["episode"] for line in lines] == [8, 16]
    assert lines[0]["policy/grad_norm"] > 0
    assert lines[1]["objective/kl"] != 0.0


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_one_sample_per_prompt_is_refused_where_samples_are_compared(
    flags: Flags, estimator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(**{"ppo.advantage_estimator": estimator})) == 2
    assert "rollout.samples_per_prompt must be at least 2" in capsys.readouterr().err
