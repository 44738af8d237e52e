"""The estimate of the work, by which ``auto`` decides."""

import math

import pytest
import torch
from torch import nn

from freshet.compute import choice
from freshet.compute.executor import OPERATIONS_PER_SECOND, STEP_SECONDS, SerialExecutor, operations, training_seconds
from freshet.compute.pool import PoolExecutor
from tests.compute.helpers import Big, make_setup
from tests.compute.test_choice import wish


def test_operations_of_a_linear_layer_are_counted_exactly():
    assert operations(make_setup()) == 2 * (8 * 3) + 2 * 3  # two per parameter, as the bias is added, too


def test_a_convolution_costs_more_than_its_parameters():
    def network() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 5, 3, padding=1, bias=False), nn.Flatten())

    assert operations(make_setup(network)) == 2 * (9 * 5) * 8  # every weight at each of 8 places


def test_what_cannot_be_counted_costs_two_operations_per_parameter():
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise RuntimeError("not here")
            return super().forward(x)

    assert operations(make_setup(lambda: Picky(8, 3))) == 2 * 27


def test_the_estimate_is_the_printed_formula():
    setup = make_setup()
    epochs, batch = setup.training.epochs, setup.training.batch_size
    steps = epochs * math.ceil(10 / batch)
    expected = 7 * (steps * STEP_SECONDS + 3 * operations(setup) * epochs * 10 / OPERATIONS_PER_SECOND)
    assert training_seconds(setup, 7) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "workers", "worth"), [(5.9, 2, False), (6.1, 2, True), (3.9, 4, False), (4.1, 4, True), (1e9, 1, False)]
)
def test_workers_are_worth_starting_when_they_save_more_than_three_seconds(seconds, workers, worth):
    assert choice.worth_starting(seconds, workers) is worth


@pytest.mark.parametrize(
    ("executor", "factory", "uploads", "kind"),
    [
        ("auto", None, 10, SerialExecutor),
        ("auto", None, 1_000_000, PoolExecutor),
        ("auto", None, math.inf, PoolExecutor),
        ("auto", Big, 2_000, PoolExecutor),
        ("serial", None, 1_000_000, SerialExecutor),
        ("processes", None, 10, PoolExecutor),
    ],
)
def test_auto_takes_workers_for_much_work_and_every_other_wish_is_fulfilled(
    monkeypatch, executor, factory, uploads, kind
):
    class Pool:
        def register(self, _: object) -> int:
            return 1

        def release(self, _: int) -> None:
            pass

        def close(self, **_: object) -> None:
            pass

    monkeypatch.setattr(choice, "start_pool", lambda _: Pool())
    setup = make_setup(factory) if factory else make_setup()
    opened = choice.open_executor(wish(executor, 2), setup, None, uploads)
    assert isinstance(opened, kind)
    opened.close()
