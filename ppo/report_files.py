"""The files that a run leaves in its folder for people, and how they are read back.

`metrics.jsonl`: one object a step, "step" first. A figure that is not finite becomes the string
"NaN", "Infinity" or "-Infinity": JSON has no such numbers, and `float()` reads all three.
`samples.jsonl`: one object a response, with its step, prompt, response and score.
`report.json`: models, planned steps, state, held-out samples before and after, next command.
`config.yaml`: the resolved settings, written by the trainer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

METRICS, SAMPLES, REPORT, CONFIG = "metrics.jsonl", "samples.jsonl", "report.json", "config.yaml"


@dataclass(frozen=True)
class ModelRow:
    """One of the models of a run."""

    role: str
    source: str
    architecture: str
    parameters: int
    trains: bool


@dataclass(frozen=True)
class Sample:
    """A prompt, what the policy answered, and what the answer scored."""

    prompt: str
    response: str
    score: float


@dataclass(frozen=True)
class Summary:
    """What `report.json` holds; every field may be missing from the file."""

    steps: int = 0
    state: str = "running"
    models: tuple[ModelRow, ...] = ()
    figures: Mapping[str, float] | None = None
    before: tuple[Sample, ...] = ()
    after: tuple[Sample, ...] = ()
    next_command: str = ""


@dataclass(frozen=True)
class RunRecord:
    """All that a run folder tells: metrics by step, samples by step, settings, summary."""

    name: str
    metrics: list[dict[str, float]]
    samples: dict[int, list[Sample]]
    config: str
    summary: Summary


def encodable(text: str) -> str:
    """Replace lone surrogates, which no UTF-8 file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def jsonable(value: Any) -> Any:
    """Turn a value into what strict JSON can carry."""
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, Mapping):
        return {encodable(str(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def append_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append objects to a JSON Lines file; they are on disk when this returns."""
    lines = [json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) for row in rows]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def keep_lines(path: Path, steps: int) -> None:
    """Keep the lines of the first steps, cutting what a killed run wrote past its checkpoint."""
    if not path.is_file():
        return
    kept = [
        line
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n")
        if _step_of(line) < steps
    ]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    partial.replace(path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Write `report.json`, whole or not at all."""
    partial = run_dir / f".{REPORT}.partial"
    text = json.dumps(jsonable(summary), ensure_ascii=False, allow_nan=False, indent=1)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(run_dir / REPORT)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON Lines file; a line cut short by a crash is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are numbers, among them those written as strings."""
    numbers = {}
    for key, value in row.items():
        try:
            numbers[key] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers


def _sample(row: Mapping[str, Any]) -> Sample:
    score = _numbers({"score": row.get("score")}).get("score", math.nan)
    return Sample(str(row.get("prompt", "")), str(row.get("response", "")), score)


def _read_summary(path: Path) -> Summary:
    """`report.json`, or the defaults where the file or a field is missing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Summary()
    known = {field.name: found[field.name] for field in fields(Summary) if field.name in found}
    known["models"] = tuple(ModelRow(**row) for row in known.get("models", ()))
    known["figures"] = _numbers(known.get("figures") or {})
    for name in ("before", "after"):
        known[name] = tuple(map(_sample, known.get(name, ())))
    return Summary(**known)


def read_run(run_dir: Path) -> RunRecord:
    """Read a run folder; what is missing is empty, and the last line of a step counts."""
    rows = map(_numbers, _read_lines(run_dir / METRICS))
    steps = {row["step"]: row for row in rows if "step" in row}
    samples: dict[int, list[Sample]] = {}
    for row in _read_lines(run_dir / SAMPLES):
        samples.setdefault(int(row.get("step", 0)), []).append(_sample(row))
    config = run_dir / CONFIG
    return RunRecord(
        name=run_dir.resolve().name,
        metrics=[steps[step] for step in sorted(steps)],
        samples=dict(sorted(samples.items())),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        summary=_read_summary(run_dir / REPORT),
    )
