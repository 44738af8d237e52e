"""Whatever order the tests come in, each draws the same numbers."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_draws() -> None:
    torch.manual_seed(0)
