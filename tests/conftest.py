"""What all tests share: one thread, one seed, and the implementations that run on this machine."""

import os
import warnings

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

IMPLS = ("reference", "torch")
if os.environ.get("TRITON_INTERPRET") == "1":
    IMPLS += ("triton",)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=IMPLS)
def impl(request):
    """An implementation of the operators; every one has to pass the test."""
    if request.param != "triton":
        yield request.param
        return
    # Under the interpreter NumPy warns of infinities and NaN that a GPU takes without a word.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield request.param
