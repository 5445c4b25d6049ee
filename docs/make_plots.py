"""Run the demo with one coefficient at a time changed, and draw what happens.

    python docs/make_plots.py FOLDER [--seeds 2] [--jobs 2]

Runs that are in FOLDER already are kept. Writes `docs/plots/*.png` and `docs/plots/runs.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

PLOTS = Path(__file__).parent / "plots"
# plot: label -> the settings that differ from the demo's
STUDIES: dict[str, dict[str, dict[str, object]]] = {
    "cliprange": {
        "ε 0.05": {"ppo.cliprange": 0.05},
        "ε 0.2": {},
        "ε 0.5": {"ppo.cliprange": 0.5},
    },
    "gae_lambda": {"λ 0": {"ppo.gae_lambda": 0.0}, "λ 0.95": {}, "λ 1": {"ppo.gae_lambda": 1.0}},
    "kl_coef": {
        "β 0": {"ppo.kl_coef": 0.0},
        "β 0.1": {"ppo.kl_coef": 0.1},
        "β 1": {"ppo.kl_coef": 1.0},
    },
    "whitening": {"whitened": {}, "not whitened": {"ppo.whiten_advantages": "false"}},
}
PANELS = {
    "objective/scores": "score",
    "objective/kl": "KL to the reference, nats",
    "policy/clipfrac_avg": "clipped tokens",
}


def folder_of(root: Path, changes: dict[str, object], seed: int) -> Path:
    """Where the run with these changes and this seed is."""
    name = "_".join(f"{key.split('.')[-1]}-{value}" for key, value in changes.items()) or "demo"
    return root / f"{name}_seed-{seed}"


def run(root: Path, changes: dict[str, object], seed: int) -> None:
    """Train, unless it is done."""
    folder = folder_of(root, changes, seed)
    if list(folder.glob("*/report.json")):
        return
    flags = {**changes, "seed": seed, "threads": 1, "output_dir": folder, "demo_dir": root / "demo"}
    command = [sys.executable, "-m", "ppo.train", *(f"--{k}={v}" for k, v in flags.items())]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics."""
    (file,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Trailing mean."""
    parts = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw(root: Path, study: str, seeds: int) -> None:
    """One row of panels; a line for each seed."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9, 2.6), layout="constrained")
    for colour, (label, changes) in zip(("C0", "C1", "C2"), STUDIES[study].items(), strict=False):
        for seed in range(seeds):
            rows = metrics(folder_of(root, changes, seed))
            for axis, key in zip(axes, PANELS, strict=True):
                axis.plot(
                    smooth([row[key] for row in rows]),
                    color=colour,
                    alpha=1 if seed == 0 else 0.5,
                    label=label if seed == 0 else None,
                )
    for axis, title in zip(axes, PANELS.values(), strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(PLOTS / f"{study}.png", dpi=130)
    plt.close(figure)


def figures(root: Path, changes: dict[str, object], seeds: int) -> list[dict[str, float]]:
    """Ends of the runs: held-out score, and means of the last five steps."""
    found = []
    for seed in range(seeds):
        folder = folder_of(root, changes, seed)
        rows = metrics(folder)[-5:]
        found.append({key: round(sum(r[key] for r in rows) / len(rows), 4) for key in PANELS})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mpl.use("Agg")
    root = options.folder.resolve()
    runs = {
        folder_of(root, changes, seed): (changes, seed)
        for study in STUDIES.values()
        for changes in study.values()
        for seed in range(options.seeds)
    }
    first, *rest = runs.values()
    run(root, *first)  # makes the demo's models
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda each: run(root, *each), rest))
    PLOTS.mkdir(exist_ok=True)
    for study in STUDIES:
        draw(root, study, options.seeds)
    table = {
        study: {label: figures(root, changes, options.seeds) for label, changes in each.items()}
        for study, each in STUDIES.items()
    }
    text = json.dumps(table, indent=1, ensure_ascii=False)
    (PLOTS / "runs.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
