"""Figures as people read them: what changed in a run, numbers, sparklines, times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Change:
    """A figure at the start and at the end, and its curve between if there is one."""

    name: str
    before: float | None
    after: float | None
    curve: list[float]


def curve(metrics: list[dict[str, float]], key: str) -> list[float]:
    """A metric over the steps, NaN where it is missing or not finite."""
    values = [row.get(key, math.nan) for row in metrics]
    return [value if math.isfinite(value) else math.nan for value in values]


def not_finite(metrics: list[dict[str, float]]) -> dict[str, int]:
    """How many steps hold NaN or inf, by metric; metrics without any are left out."""
    counts: dict[str, int] = {}
    for row in metrics:
        for key, value in row.items():
            if not math.isfinite(value):
                counts[key] = counts.get(key, 0) + 1
    return counts


def changes(figures: Mapping[str, float], metrics: list[dict[str, float]]) -> list[Change]:
    """What the run changed: held-out figures before and after, metrics at first and last step."""
    found = []
    for name, before in figures.items():
        if name.endswith(" before"):
            stem = name.removesuffix(" before")
            label = f"held-out {stem.removeprefix('objective/')}"
            found.append(Change(label, before, figures.get(f"{stem} after"), []))
    for name, value in figures.items():
        stem = name.removesuffix(" after").removesuffix(" before")
        if stem == name or (name.endswith(" after") and f"{stem} before" not in figures):
            found.append(Change(name.removeprefix("objective/"), None, value, []))
    for label, key in (
        ("training score", "objective/scores"),
        ("training judge", "objective/judge"),
        ("KL, nats/sequence", "objective/kl"),
        ("distinct responses", "samples/distinct_frac"),
    ):
        points = [row[key] for row in metrics if key in row]
        if points:
            found.append(Change(label, points[0], points[-1], curve(metrics, key)))
    return found


def number(value: float | None, digits: int | None = None) -> str:
    """A figure in at most nine characters, "-" when missing.

    `digits` are decimals for a column; without it three, fewer for large and more for small ones.
    """
    if value is None:
        return "-"
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e5 or (digits is None and 0 < size < 1e-4):
        return f"{value:.1e}"
    if digits is None:
        digits = 1 if size >= 100 else 3 if size >= 0.01 or size == 0 else 5
    return f"{value:.{digits}f}"


def parameters(count: int) -> str:
    """A number of parameters, as people say it: 0.53 M, 7.62 B."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.2f} M" if count >= 10_000 else f"{count:,}"


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """Curve in one line of block characters; a space where nothing is finite."""
    size = max(1, math.ceil(len(values) / width))
    means = []
    for start in range(0, len(values), size):
        finite = [value for value in values[start : start + size] if math.isfinite(value)]
        means.append(sum(value / len(finite) for value in finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(BLOCKS) - 1
    return "".join(
        " " if math.isnan(mean) else BLOCKS[round((mean - low) / span * top) if span > 0 else 0]
        for mean in means
    )


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
