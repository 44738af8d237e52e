"""Ray actors on a cluster of two nodes: the same bits, also after an actor or a node dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch import nn

from freshet.compute import ray as on_ray
from freshet.compute.pool import PoolExecutor, StartFailed
from freshet.compute.ray import RayPool, RayWorker
from freshet.errors import ConfigError, RunError
from freshet.training.device_eval import DeviceEvaluation
from tests.test_own_trainer import build, wild

from .helpers import (
    METHODS,
    TIMEOUT_SECONDS,
    UNTIL,
    Big,
    Deadly,
    Failing,
    Patient,
    assert_same_run,
    federation,
    make_setup,
    make_work,
    same,
    wait_for_pids,
)


def test_a_missing_ray_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^run\.executor: Ray is not installed .*pip install 'freshet-fl\[ray\]'$"):
        RayPool()


def test_an_address_where_nothing_listens_is_reported_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", MagicMock(**{"is_initialized.return_value": False}))
    with pytest.raises(ConfigError, match=r"^run\.address: no Ray cluster answers at 127\.0\.0\.1:1 \(.*refused"):
        RayPool(address="127.0.0.1:1")


def test_a_cluster_without_a_free_cpu_is_given_up_only_when_no_worker_is_ready(monkeypatch):
    ray, others = MagicMock(), iter([True] * 5 + [False] * 5)
    ray.wait.return_value = ([], [])  # a second passes
    monkeypatch.setattr(on_ray, "time", SimpleNamespace(monotonic=lambda: ray.wait.call_count))
    with pytest.raises(StartFailed, match="no free CPU or GPU for 2 s"):
        RayWorker(ray, MagicMock(), lambda: next(others), timeout=2.5).wait_ready()
    assert ray.wait.call_count == 5 + 3


@pytest.mark.parametrize(
    ("workers", "gpus", "device", "asked"),
    [(2, 2, "auto", 1.0), (2, 4, "cuda", 1.0), (5, 2, "auto", 1 / 3), (4, 1, "auto", 0.25), (2, 2, "cpu", None)],
)
def test_actors_share_the_gpus_of_the_cluster_unless_they_train_on_the_cpu(monkeypatch, workers, gpus, device, asked):
    ray = MagicMock(**{"is_initialized.return_value": True, "cluster_resources.return_value": {"CPU": 8, "GPU": gpus}})
    ray.wait.return_value = ([1], [])
    monkeypatch.setitem(sys.modules, "ray", ray)
    RayPool(workers, device=device).close(now=True)
    assert ray.remote.call_args.kwargs.get("num_gpus") == asked
    assert ray.remote.call_args.kwargs["num_cpus"] == 1


def test_a_cluster_without_a_gpu_is_asked_for_none(monkeypatch):
    ray = MagicMock(**{"is_initialized.return_value": True, "cluster_resources.return_value": {"CPU": 2}})
    ray.wait.return_value = ([1], [])
    monkeypatch.setitem(sys.modules, "ray", ray)
    RayPool().close(now=True)
    assert "num_gpus" not in ray.remote.call_args.kwargs


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with one CPU each, on the loopback interface."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # read by the import
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'freshet-fl[ray]'")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    built = Cluster(initialize_head=True, head_node_args=node)
    built.second = built.add_node(num_cpus=1, node_ip_address="127.0.0.1")
    yield built
    ray.shutdown()
    built.shutdown()


@pytest.fixture(scope="module")
def pool(cluster):
    built = RayPool(address=cluster.address)
    assert len(built.workers) == 2
    yield built
    built.close(now=True)


@pytest.fixture
def executor(pool):
    built = PoolExecutor(make_setup(), pool, owns_pool=False)
    yield built
    built.close()


def check(executor, setup, count=4):
    works = [make_work(setup, trip) for trip in range(count)]
    futures = [executor.train(work, 0.0) for work in works]
    assert all(same(f.result(TIMEOUT_SECONDS), setup.trainer().train(w)) for f, w in zip(futures, works, strict=True))


def test_training_and_scores_equal_those_of_this_process(executor):
    setup = make_setup()
    check(executor, setup)
    weights = make_work(setup).assignment.weights
    assert executor.evaluate(weights).result(TIMEOUT_SECONDS) == setup.trainer().evaluate(weights)
    for evaluation in (DeviceEvaluation(weights, 1, [0, 1]), DeviceEvaluation(weights, 1, [1], steps=3, lr=0.1)):
        theirs, ours = (
            executor.evaluate_devices(evaluation, 0.0).result(TIMEOUT_SECONDS),
            setup.trainer().evaluate_devices(evaluation),
        )
        assert [scores.tobytes() for scores in theirs] == [scores.tobytes() for scores in ours]


def test_factories_may_be_lambdas_and_models_large(pool):
    for factory in (lambda: nn.Linear(8, 3, bias=False), Big):
        setup = make_setup(factory)
        executor = PoolExecutor(setup, pool, owns_pool=False)
        check(executor, setup, 2)
        executor.close()


@pytest.mark.parametrize("method", METHODS)
def test_ray_gives_the_same_bits_as_one_process(pool, serial_run, tmp_path, method):
    assert_same_run(federation(method).run(UNTIL, out=tmp_path / "run", pool=pool), serial_run(method))


def test_an_own_training_loop_gives_the_same_bits_as_one_process(pool, tmp_path):
    one = build("fedasmu", wild).run(40, out=tmp_path / "one")
    assert_same_run(build("fedasmu", wild).run(40, out=tmp_path / "two", pool=pool), one)


def test_an_error_in_training_arrives_with_its_traceback(executor):
    with pytest.raises(RunError, match=r"(?s)training failed in a worker:.*ZeroDivisionError: one by nothing"):
        work = make_work(make_setup(), rule=Failing(ZeroDivisionError("one by nothing")))
        executor.train(work, 0.0).result(TIMEOUT_SECONDS)


def test_an_actor_killed_in_training(executor, tmp_path):
    work = make_work(make_setup(), rule=Patient(tmp_path))
    future = executor.train(work, 0.0)
    os.kill(wait_for_pids(tmp_path)[0], signal.SIGKILL)
    (tmp_path / "go").touch()
    assert same(future.result(TIMEOUT_SECONDS), make_setup().trainer().train(work))


def test_a_call_that_always_kills_its_actor_fails(executor, tmp_path):
    with pytest.raises(RunError, match=r"call \(train\) killed its worker 3 times"):
        executor.train(make_work(make_setup(), rule=Deadly(tmp_path / "count", 99)), 0.0).result(TIMEOUT_SECONDS)
    assert (tmp_path / "count").stat().st_size == 3


def test_a_node_that_dies_during_training(executor, cluster, tmp_path):
    setup = make_setup()
    check(executor, setup)
    works = [make_work(setup, trip, Patient(tmp_path)) for trip in range(2)]
    futures = [executor.train(work, 0.0) for work in works]
    wait_for_pids(tmp_path, 2)
    cluster.remove_node(cluster.second, allow_graceful=False)
    (tmp_path / "go").touch()
    assert all(same(f.result(TIMEOUT_SECONDS), setup.trainer().train(w)) for f, w in zip(futures, works, strict=True))
    check(executor, setup, 8)


SCRIPT = """
import ray
from torch import nn
from freshet.compute.pool import PoolExecutor, StartFailed
from freshet.compute.ray import RayPool, RayWorker
from tests.compute.helpers import make_setup, make_work, same

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x)

setup = make_setup(lambda: Net())
executor = PoolExecutor(setup, RayPool(1), owns_pool=True)
work = make_work(setup)
assert same(executor.train(work, 0.0).result(), setup.trainer().train(work))
assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"
executor.close()
assert not ray.is_initialized()
"""


def test_a_script_without_a_main_guard_starts_and_ends_its_own_cluster(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'freshet-fl[ray]'")
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""
    assert done.stderr == b""
