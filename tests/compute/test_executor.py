"""The serial executor, the warm-up executor and the estimate of training time."""

import math

import pytest
import torch
from torch import nn

from freshet.compute import executor as executors
from freshet.compute.executor import (
    OPERATIONS_PER_SECOND,
    STEP_SECONDS,
    LazyFuture,
    SerialExecutor,
    WarmupExecutor,
    estimate_training_seconds,
    forward_operations,
)
from freshet.compute.pool import PoolExecutor
from freshet.errors import ConfigError
from tests.conftest import exploring

from .helpers import Patient, make_setup, make_work, same


def test_a_result_is_computed_once_when_it_is_first_needed():
    calls = []
    future = LazyFuture(lambda: calls.append(1) or "value")
    assert not future.done()
    assert calls == []
    assert (future.result(), future.result()) == ("value", "value")
    assert future.done()
    assert calls == [1]


def test_a_cancelled_result_is_never_computed():
    calls = []
    future = LazyFuture(lambda: calls.append(1))
    future.cancel()
    with pytest.raises(AssertionError):
        future.result()
    assert calls == []


def test_a_computed_result_survives_a_cancel():
    future = LazyFuture(lambda: "value")
    future.result()
    future.cancel()
    assert future.result() == "value"


def test_an_error_is_raised_at_every_call():
    future = LazyFuture(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            future.result()


def test_the_warm_up_happens_once_and_not_before_the_first_result(monkeypatch):
    monkeypatch.setattr(executors, "WARMUP_DELAY_SECONDS", 0.01)
    setup, calls = make_setup(), []
    executor = WarmupExecutor(SerialExecutor(setup), lambda: calls.append("warm"))
    works = [make_work(setup, trip) for trip in range(3)]
    futures = [executor.train(work, 0.0) for work in works[:2]]
    assert calls == [] and not futures[0].done()
    assert same(futures[0].result(), setup.trainer().train(works[0])) and futures[0].done()
    assert calls == ["warm"]
    futures.append(executor.train(works[2], 0.0))
    assert all(same(f.result(), setup.trainer().train(w)) for f, w in zip(futures, works, strict=True))
    assert executor.evaluate(works[0].assignment.weights).result() == setup.trainer().evaluate(
        works[0].assignment.weights
    )
    assert calls == ["warm"]
    executor.close()


def test_the_warm_up_does_not_wait_long_for_the_first_result(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "WARMUP_DELAY_SECONDS", 0.01)
    executor = PoolExecutor(make_setup(), pool, owns_pool=False)
    warmed = WarmupExecutor(executor, (tmp_path / "go").touch)  # training waits for this file
    assert warmed.train(make_work(make_setup(), rule=Patient(tmp_path)), 0.0).result()
    executor.close()


# ---- the estimate by which ``auto`` decides


def test_operations_of_a_linear_layer_are_counted_exactly():
    assert forward_operations(make_setup()) == 2 * (8 * 3) + 2 * 3  # two per parameter, bias included


def test_a_convolution_costs_more_than_its_parameters():
    def network() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 5, 3, padding=1, bias=False), nn.Flatten())

    assert forward_operations(make_setup(network)) == 2 * (9 * 5) * 8  # every weight at each of 8 positions


def test_a_model_that_cannot_be_counted_costs_two_operations_per_parameter():
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise RuntimeError("not here")
            return super().forward(x)

    assert forward_operations(make_setup(lambda: Picky(8, 3))) == 2 * 27


def test_the_estimate_follows_the_documented_formula():
    setup = make_setup()
    epochs, batch = setup.training.epochs, setup.training.batch_size
    steps = epochs * math.ceil(10 / batch)
    expected = 7 * (steps * STEP_SECONDS + 3 * forward_operations(setup) * epochs * 10 / OPERATIONS_PER_SECOND)
    assert estimate_training_seconds(setup, 7) == pytest.approx(expected)


# ---- torch threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_run_restores_the_users_torch_threads(federate, tmp_path, two_threads):
    federate("fedavg").run(5, out=tmp_path / "run")
    assert torch.get_num_threads() == 2


def test_a_run_that_cannot_start_restores_the_users_torch_threads(federate, tmp_path, two_threads):
    with pytest.raises(ConfigError, match=r"training\.device"):
        federate("fedavg", training={"device": "cuda"}).run(5, out=tmp_path / "run")
    assert torch.get_num_threads() == 2
    assert not (tmp_path / "run").exists(), "a run that cannot start leaves no folder"


def test_worker_processes_give_the_same_bits_as_this_process(federate, finished, tmp_path):
    method = exploring("fedasmu")
    result = federate(method, run={"executor": "processes", "workers": 2}).run(60, out=tmp_path / "run")
    serial = finished("fedasmu")
    assert result.summary["weights_sha256"] == serial.summary["weights_sha256"]
    assert (result.directory / "events.jsonl").read_bytes() == (serial.directory / "events.jsonl").read_bytes()
