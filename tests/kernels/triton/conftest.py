"""These tests run kernels in Triton's interpreter, which is chosen when a kernel is decorated."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """Skip without the interpreter; poison `torch.empty`, so that memory left unwritten shows."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1 before pytest starts")
    torch.use_deterministic_algorithms(True)
    # NumPy warns of infinities and NaN in lanes that a kernel discards; a GPU does not.
    with np.errstate(all="ignore"):
        yield
    torch.use_deterministic_algorithms(False)
