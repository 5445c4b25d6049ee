"""The curves of a run, drawn with matplotlib: what to plot, and what healthy looks like.

matplotlib is imported where it draws: a run starts without it.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppo.report_figures import curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One plot: the metrics in it with their labels, the unit, and how to read it."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    healthy: str
    floor: float | None = None


PANELS = (
    Panel(
        "Score",
        "reward per response",
        (("objective/scores", "score"),),
        "Rises, then levels off.",
    ),
    Panel(
        "Judge",
        "judge's own scale",
        (("objective/judge", "judge"),),
        "Measures, never trains. Falling while the score rises: the reward model is being gamed.",
    ),
    Panel(
        "KL to the reference",
        "nats per sequence",
        (("objective/kl", "KL"),),
        "Grows slowly from 0 and flattens. A steep climb: raise kl_coef or lower actor_lr.",
    ),
    Panel(
        "Policy loss",
        "weighted mean",
        (("loss/policy_avg", "policy loss"),),
        "Small and noisy near 0; no trend is needed. Large spikes: steps too big.",
    ),
    Panel(
        "Value loss",
        "½ · reward²",
        (("loss/value_avg", "value loss"),),
        "Falls, then stays low. Rising for long: the critic cannot keep up.",
    ),
    Panel(
        "Explained variance",
        "fraction of return variance",
        (("val/explained_variance", "explained variance"),),
        "Climbs from 0 towards 1. Below 0 the critic is worse than a constant (axis ends at −1).",
        floor=-1.0,
    ),
    Panel(
        "Clip fraction",
        "fraction of tokens",
        (("policy/clipfrac_avg", "policy"), ("val/clipfrac_avg", "value")),
        "Policy mostly below 0.2. Always 0: steps may be too small; above 0.3: too big.",
    ),
    Panel(
        "Entropy",
        "nats per token",
        (("policy/entropy_avg", "entropy"),),
        "Falls slowly. A dive towards 0: the policy collapses to a few answers.",
    ),
    Panel(
        "Response length",
        "tokens",
        (("tokens/response_length_mean", "mean"), ("tokens/response_length_max", "max")),
        "Mean stays clear of 0 and of max_new_tokens, unless length is what is rewarded.",
    ),
    Panel(
        "Distinct and truncated",
        "fraction of responses",
        (("samples/distinct_frac", "distinct"), ("tokens/truncated_frac", "truncated")),
        "Distinct near 1. Truncated (no end token) falls towards 0.",
    ),
    Panel(
        "Gradient norm",
        "L2 norm before clipping",
        (("policy/grad_norm", "actor"), ("value/grad_norm", "critic")),
        "Steady. Spikes are cut at max_grad_norm; growth without end is trouble.",
    ),
    Panel(
        "Time",
        "seconds per step",
        (("time/generate", "generate"), ("time/score", "score"), ("time/update", "update")),
        "Steady. Shows which phase to speed up first.",
    ),
)


@dataclass(frozen=True)
class Theme:
    """Colours of a plot."""

    paper: str
    ink: str
    faint: str
    grid: str
    bad: str
    lines: tuple[str, ...]


LIGHT = Theme(
    "#ffffff", "#1b1f24", "#59636e", "#e4e7eb", "#c62828", ("#1f5fd0", "#c2570c", "#2b7a4b")
)
DARK = Theme(
    "#1a1e24", "#e6e9ed", "#9aa4af", "#333a43", "#ff7b72", ("#7cabff", "#f5a35c", "#6fcf97")
)


def shown_panels(metrics: Sequence[dict[str, float]]) -> list[Panel]:
    """The panels that have something to show."""
    keys = {key for row in metrics for key in row}
    return [panel for panel in PANELS if any(key in keys for key, _ in panel.lines)]


def smoothing(metrics: Sequence[dict[str, float]]) -> int:
    """Steps in the running mean: a 25th of the run, so that short runs show what was measured."""
    return max(1, len(metrics) // 25)


def running_mean(
    steps: Sequence[float], values: Sequence[float], window: int
) -> tuple[list[float], list[float]]:
    """Steps, and the mean of the last `window` values at each; NaN is left out.

    Ten points a window are enough for the eye and keep the work linear in the steps.
    """
    last = len(values) - 1
    ends = [end for end in range(last + 1) if (last - end) % max(1, window // 10) == 0]
    means = []
    for end in ends:
        seen = [value for value in values[max(0, end + 1 - window) : end + 1] if value == value]
        means.append(sum(seen) / len(seen) if seen else math.nan)
    return [steps[end] for end in ends], means


@contextmanager
def _plain_matplotlib() -> Iterator[None]:
    """Draw the same way whatever the person's matplotlibrc says.

    Warnings are about looks only (extreme values, a missing glyph): no run should print or fail on
    them after hours of training.
    """
    import matplotlib.style

    with warnings.catch_warnings(), matplotlib.style.context("default"):
        warnings.simplefilter("ignore")
        yield


def _draw(axes: Axes, panel: Panel, metrics: list[dict[str, float]], theme: Theme) -> None:
    """Draw one panel: faint points, a running mean, and crosses where a value is not finite."""
    from matplotlib.ticker import MaxNLocator

    steps = [row["step"] for row in metrics]
    window = smoothing(metrics)
    for (key, label), colour in zip(panel.lines, theme.lines, strict=False):
        # float32 is the range of the metrics; beyond it the scaling of the axes overflows.
        values = [value if abs(value) < 1e38 else math.nan for value in curve(metrics, key)]
        if window > 1:
            axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        marker = "o" if len(steps) < 20 else ""
        means = running_mean(steps, values, window)
        axes.plot(*means, color=colour, linewidth=1.8, marker=marker, ms=3, label=label)
        pairs = zip(metrics, values, strict=True)
        bad = [row["step"] for row, value in pairs if key in row and math.isnan(value)]
        foot = axes.get_xaxis_transform()
        axes.plot(bad, [0.03] * len(bad), "x", color=theme.bad, transform=foot, ms=5)
    low, high = axes.get_ylim()
    if panel.floor is not None and low < panel.floor < high:
        axes.set_ylim(bottom=panel.floor)
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    axes.set_facecolor(theme.paper)
    axes.set_xlabel("step", loc="left", color=theme.faint, fontsize=9)
    axes.set_ylabel(panel.unit, color=theme.faint, fontsize=9)
    axes.tick_params(colors=theme.faint, labelsize=8, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.spines[:].set_visible(False)
    if len(panel.lines) > 1:
        # Beside the name of the axis, where it hides no line.
        axes.legend(
            loc="upper right",
            bbox_to_anchor=(1, -0.07),
            ncols=3,
            fontsize=8.5,
            frameon=False,
            labelcolor=theme.ink,
        )


def _png(figure: Figure, dpi: int) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def panel_png(panel: Panel, metrics: list[dict[str, float]], theme: Theme) -> bytes:
    """One panel as a PNG, for a page that carries title and explanation as text."""
    with _plain_matplotlib():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.8, 2.3), layout="constrained", facecolor=theme.paper)
        _draw(figure.subplots(), panel, metrics, theme)
        return _png(figure, dpi=150)


def write_curves(path: Path, name: str, metrics: list[dict[str, float]]) -> None:
    """All panels in one picture, each with its title and how to read it."""
    panels = shown_panels(metrics)
    with _plain_matplotlib():
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        rows = max(1, math.ceil(len(panels) / 3))
        layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
        figure = Figure(figsize=(15, 3.7 * rows + 0.6), layout=layout, facecolor="white")
        grid = figure.subplots(rows, 3, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw(axes, panel, metrics, LIGHT)
            caption = textwrap.fill(panel.healthy, 68)
            caption += "\n" * (1 - caption.count("\n"))
            axes.set_title(
                caption, loc="left", fontsize=9, color=LIGHT.faint, pad=6, linespacing=1.3
            )
            axes.annotate(
                panel.title,
                (0, 1),
                xycoords="axes fraction",
                xytext=(0, 35),
                textcoords="offset points",
                fontsize=12,
                fontweight="bold",
                color=LIGHT.ink,
            )
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        # The folder's name is not ours: no formulas from "$", no glyphs that the font lacks.
        title = f"{name.encode('ascii', 'replace').decode()}: {len(metrics)} steps"
        window = smoothing(metrics)
        title += f" (bold: mean of the last {window})" if window > 1 else ""
        figure.suptitle(title, fontsize=14, parse_math=False)
        path.write_bytes(_png(figure, dpi=110))
