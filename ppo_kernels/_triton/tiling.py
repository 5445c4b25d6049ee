"""The host side that the launchers over [B, T] share: how tensors are cut, tickets, ops, specs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ppo_kernels._triton._compile import CompileSpec

SLOTS_PER_WARP = 256
"""Partial results that a warp of the last program merges at a time, 8 a thread."""


class Tiling(NamedTuple):
    """How the elements of [B, T] tensors are cut into tiles of ROWS x COLS."""

    n_rows: int
    n_cols: int
    ROWS: int
    COLS: int
    VEC: int
    flat: bool

    @property
    def n_tiles(self) -> int:
        return triton.cdiv(self.n_rows, self.ROWS) * triton.cdiv(self.n_cols, self.COLS)

    def strides(self, x: Tensor | None) -> tuple[int, int]:
        """Row and column stride of `x` in this tiling."""
        return (0, 1) if x is None or self.flat else x.stride()

    @property
    def shape(self) -> dict[str, int]:
        return {"ROWS": self.ROWS, "COLS": self.COLS, "VEC": self.VEC}


TILES = {
    ("flat", 4): (1, 1024),
    ("flat", 1): (1, 512),
    ("strided", 4): (8, 64),
    ("strided", 1): (2, 256),
}
"""Rows and columns of a tile by layout and VEC: 8 elements a thread at 4 warps, so two 128-bit
loads in flight for each fp32 input; 4 where the elements' own addresses take the registers."""


def tiling(*tensors: Tensor | None, one_tile: int = 0) -> Tiling:
    """Contiguous tensors are one long row, whatever B and T are; others keep their strides.

    VEC = 4 promises the compiler that rows start and end on a multiple of 4 elements, which is
    what 128-bit accesses to fp32 need. Beside dtypes, that and the tile are all that compilation
    depends on, so new B and T compile nothing. Contiguous tensors of up to `one_tile` elements
    are one tile of that size.
    """
    given = [x for x in tensors if x is not None]
    n_rows, n_cols = given[0].shape
    flat = all(x.is_contiguous() for x in given)
    if flat:
        n_rows, n_cols = 1, n_rows * n_cols
    multiples = [n_cols] if flat else [n_cols, *(x.stride(0) for x in given)]
    vec = vector_width(given, multiples)
    rows, cols = TILES["flat" if flat else "strided", vec]
    if flat and 0 < n_cols <= one_tile:
        cols = one_tile
    return Tiling(n_rows, n_cols, rows, cols, vec, flat)


def spec_tiles() -> dict[str, dict[str, int]]:
    """The tiles of `tiling` by name, as compile-time arguments."""
    return {
        layout + (" odd" if vec == 1 else ""): {"ROWS": rows, "COLS": cols, "VEC": vec}
        for (layout, vec), (rows, cols) in TILES.items()
    }


def vector_width(tensors: Sequence[Tensor], multiples: list[int]) -> int:
    """4 where rows start and end on a multiple of 4 elements and memory on one of 16 bytes."""
    aligned = all(x.data_ptr() % 16 == 0 for x in tensors)
    return 4 if aligned and all(m % 4 == 0 for m in multiples) else 1


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """The mask's own memory as uint8: Triton reads bool as i1, which it does not vectorise."""
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make x's GPU current for a launch: Triton launches on the current device."""
    if x.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(x.device).device(x.device)


_tickets: dict[tuple[str, int | None, int], Tensor] = {}


def ticket(device: torch.device) -> Tensor:
    """An int32 zero that every launch leaves at zero, so that none needs to clear it first.

    Launches on one stream run one after the other and share it. Each stream has its own, and a
    CUDA graph gets one from its own pool because it may be replayed on any stream.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    on_gpu = device.type != "cpu"
    stream = torch.accelerator.current_stream(device).stream_id if on_gpu else 0
    key = (device.type, device.index, stream)
    if key not in _tickets:
        _tickets[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _tickets[key]


class RowTile(NamedTuple):
    """Tile of a kernel that walks rows from right to left."""

    rows: int
    cols: int
    num_warps: int

    def halved(self) -> RowTile:
        """For rows without vector access: lanes then hold strided elements, and scans over such
        take about twice the registers per element."""
        rows, cols = (self.rows // 2, self.cols) if self.rows > 1 else (1, self.cols // 2)
        return RowTile(rows, cols, self.num_warps)


ROW_TILES = {64: RowTile(4, 64, 1), 256: RowTile(2, 256, 2), 2048: RowTile(1, 1024, 4)}
"""Tile by the longest T that it serves: 8 elements a thread, and T ≤ 64 needs no barrier."""

LONG_ROW_TILE = RowTile(1, 2048, 8)


def spec_row_tiles() -> dict[str, tuple[dict[str, int], int]]:
    """The tiles of `row_tiling` by name, as compile-time arguments, with their warps."""
    specs = {}
    for tile in [*ROW_TILES.values(), LONG_ROW_TILE]:
        for name, t, vec in (("", tile, 4), (" odd", tile.halved(), 1)):
            shape = {"ROWS": t.rows, "COLS": t.cols, "VEC": vec}
            specs[f"{t.rows}x{t.cols}{name}"] = (shape, t.num_warps)
    return specs


class RowTiling(NamedTuple):
    """Launch of a kernel that walks rows: one program for every ROWS rows."""

    n_programs: int
    shape: dict[str, int]
    num_warps: int


def row_tiling(*tensors: Tensor | None) -> RowTiling:
    given = [x for x in tensors if x is not None]
    n_rows, n_cols = given[0].shape
    vec = vector_width(given, [n_cols, *(x.stride(0) for x in given)])
    tile = next((t for longest, t in ROW_TILES.items() if n_cols <= longest), LONG_ROW_TILE)
    rows, cols, num_warps = tile if vec > 1 else tile.halved()
    n_programs = max(1, triton.cdiv(n_rows, rows))
    return RowTiling(n_programs, {"ROWS": rows, "COLS": cols, "VEC": vec}, num_warps)


def strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 1) if x is None else x.stride()


def run(name: str, launch: Callable[..., Any], *args: object) -> Any:
    """Call an op without gradient: its launcher in eager mode, the registered op in a graph.

    The boundary of a custom op costs about 60 µs a call, several times what these kernels take.
    """
    if not torch.compiler.is_compiling():
        return launch(*args)
    detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
    return getattr(torch.ops.ppo_kernels, name)(*detached)


def refuse_second_derivative(name: str) -> None:
    """Raise in a backward pass that is itself recorded.

    `once_differentiable` raises only where grad_output needs a gradient, which that of a loss
    does not: a second derivative through a model would silently lack a term.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} can be differentiated once only, not with create_graph=True")


FLOATS = {"eps", "gamma", "gae_lambda", "kl_coef", "low", "high", "dual_clip", "vf_coef"}
FLOATS |= {"cliprange_value"}


def compile_spec(
    kernel: Any,
    label: str,
    constexprs: dict[str, Any],
    pointers: dict[str, str | None],
    num_warps: int = 4,
    streaming_loads: bool = True,
) -> CompileSpec:
    """What a launcher asks for with aligned inputs whose last stride is 1.

    `pointers` names those that are not fp32; None stands for an absent one.
    """
    absent = {name: None for name, dtype in pointers.items() if dtype is None}
    signature: dict[str, str] = {}
    fixed = {**constexprs, **absent}
    for name in kernel.arg_names:
        if name.endswith("_col"):
            fixed[name] = 1
        elif name.endswith("_ptr") and name not in absent:
            signature[name] = pointers.get(name) or "*fp32"
        elif name not in fixed:
            signature[name] = "fp32" if name in FLOATS else "i32"
    aligned = {name: 16 for name in signature if name.endswith("_ptr")}
    return CompileSpec(kernel, signature, fixed, aligned, num_warps, 3, label, streaming_loads)
