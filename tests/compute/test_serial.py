"""The serial executor: a result is computed once, when it is first asked for."""

import pytest
import torch

from freshet.compute.executor import Lazy
from freshet.errors import ConfigError


def test_nothing_is_computed_before_it_is_asked_for_and_then_only_once():
    calls = []
    future = Lazy(lambda: calls.append(1) or "value")
    assert not future.done()
    assert calls == []
    assert (future.result(), future.result()) == ("value", "value")
    assert future.done()
    assert calls == [1]


def test_a_cancelled_result_is_never_computed():
    calls = []
    future = Lazy(lambda: calls.append(1))
    future.cancel()
    with pytest.raises(AssertionError):
        future.result()
    assert calls == []


def test_what_was_computed_survives_a_late_cancel():
    future = Lazy(lambda: "value")
    future.result()
    future.cancel()
    assert future.result() == "value"


def test_a_failure_is_raised_again_and_not_swallowed():
    future = Lazy(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            future.result()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_run_gives_the_users_torch_threads_back(federate, tmp_path, two_threads):
    federate("fedavg").run(5, out=tmp_path / "run")
    assert torch.get_num_threads() == 2


def test_a_run_that_cannot_start_gives_the_users_torch_threads_back(federate, tmp_path, two_threads):
    with pytest.raises(ConfigError, match=r"training\.device"):
        federate("fedavg", training={"device": "cuda"}).run(5, out=tmp_path / "run")
    assert torch.get_num_threads() == 2
    assert not (tmp_path / "run").exists(), "what cannot start leaves no folder behind"


def test_worker_processes_give_the_same_bits_as_this_process(federate, finished, tmp_path):
    result = federate("fedasmu", run={"executor": "processes", "workers": 2}).run(60, out=tmp_path / "run")
    serial = finished("fedasmu")
    assert result.summary["weights_sha256"] == serial.summary["weights_sha256"]
    assert (result.directory / "events.jsonl").read_bytes() == (serial.directory / "events.jsonl").read_bytes()
