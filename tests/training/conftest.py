"""Each test draws the same random numbers, in any order of tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_draws() -> None:
    torch.manual_seed(0)
