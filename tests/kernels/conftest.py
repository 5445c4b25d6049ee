"""What all tests of operators share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory():
    """Fill what torch.empty returns with NaN, so that a place nobody has written to shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
