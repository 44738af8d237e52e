"""A run stopped at any moment and resumed gives the same log and the same model, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from freshet import Federation, Observer, RunError
from freshet.runs import checkpoint
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

from .helpers import Crash, CrashError, outputs

SMALL = {
    "training": {"epochs": 3, "batch_size": 20},
    "data": {"train_samples": 300, "test_samples": 100},
    "fleet": {"devices": 12, "ratio": 8, "loss": 0.05, "on_seconds": 200.0, "off_seconds": 40.0},
}
METHODS = [
    "fedasmu",
    "fedasmu-course",
    "fedasmu-fresh",
    "fedssmu-course",
    "fedssmu",
    "fedbuff",
    "port",
    "moon",
    "feddyn",
    "asofed",
    "fedavg",
]


def federation(method: str, until: float = 150.0, every: float = 17.0) -> Federation:
    run = {"executor": "serial", "per_round": 4, "in_flight": 8, "until": until, "checkpoint_every": every}
    options = {"name": method} | ({"K": 3} if method in ("fedbuff", "port") else {})
    return Federation(method=options, seed=3, run=run, **SMALL)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_crashes_repeatedly_equals_the_uninterrupted_one(method: str, tmp_path: Path) -> None:
    whole = federation(method).run(out=tmp_path / "whole")
    total, rng = len((tmp_path / "whole" / "events.jsonl").read_bytes().splitlines()), random.Random(method)
    directory, crashes = tmp_path / "cut", 0
    with pytest.raises(CrashError):
        federation(method).run(out=directory, observers=[Crash(rng.randint(1, total))])
    for _ in range(4):
        crash = Crash(rng.randint(1, total))
        try:
            federation(method).resume(directory, observers=[crash])
        except CrashError:
            crashes += 1
            continue
        break
    else:
        federation(method).resume(directory)
    assert outputs(directory) == outputs(whole.directory)
    assert audit(RunDirectory(directory)).passed
    assert len(list((directory / "checkpoint").iterdir())) == 1, "a finished run keeps only its last checkpoint"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "executor"), [("fedasmu", "serial"), ("fedavg", "processes")])
def test_ten_kills_at_random_moments_change_nothing(method: str, executor: str, tmp_path: Path) -> None:
    until, every = 3000.0, 20.0
    whole = federation(method, until, every).run(out=tmp_path / "whole")
    config, directory = whole.directory / "config.toml", tmp_path / "cut"
    rng, kills = random.Random(1), 0
    command = ["run", "--config", str(config), "--out", str(directory), "--quiet", "--executor", executor, "-w", "2"]
    while kills < 10:
        process = subprocess.Popen(
            [sys.executable, "-m", "freshet", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        before = _newest(directory)
        while process.poll() is None and _newest(directory) == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.15))
        assert process.poll() is None, "the run ended before its ten kills"
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        command = ["resume", str(directory), "--quiet"]
    subprocess.run([sys.executable, "-m", "freshet", *command], check=True, capture_output=True)
    assert outputs(directory) == outputs(whole.directory)


def _newest(directory: Path) -> int:
    folder = directory / "checkpoint"
    return max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=0) if folder.is_dir() else 0


def crashed_run(tmp_path: Path, after: int = 70) -> Path:
    with pytest.raises(CrashError):
        federation("fedasmu").run(out=tmp_path / "cut", observers=[Crash(after)])
    return tmp_path / "cut"


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path: Path) -> None:
    whole, directory = federation("fedasmu").run(out=tmp_path / "whole"), crashed_run(tmp_path)
    newest = directory / "checkpoint" / f"{_newest(directory):06d}"
    content = bytearray((newest / "arrays.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "arrays.safetensors").write_bytes(content)
    watcher = Crash(10**9)
    federation("fedasmu").resume(directory, observers=[watcher])
    assert any("is damaged (arrays.safetensors does not match its checksum)" in message for message in watcher.messages)
    assert outputs(directory) == outputs(whole.directory)


def test_an_incomplete_last_line_is_removed_and_reported(tmp_path: Path) -> None:
    whole, directory = federation("fedasmu").run(out=tmp_path / "whole"), crashed_run(tmp_path)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b'{"seq": 9999, "time": 1')
    watcher = Crash(10**9)
    federation("fedasmu").resume(directory, observers=[watcher])
    assert any("the last one incomplete" in message and "cut off" in message for message in watcher.messages)
    assert outputs(directory) == outputs(whole.directory)


def test_a_log_shorter_than_the_newest_checkpoint_resumes_from_the_one_before(tmp_path: Path) -> None:
    whole, directory = federation("fedasmu").run(out=tmp_path / "whole"), crashed_run(tmp_path)
    log = directory / "events.jsonl"
    newest = json.loads((directory / "checkpoint" / f"{_newest(directory):06d}" / "state.json").read_text())
    os.truncate(log, newest["state"]["log"]["events"] - 1)
    watcher = Crash(10**9)
    federation("fedasmu").resume(directory, observers=[watcher])
    assert any("events.jsonl was cut off before it" in message for message in watcher.messages)
    assert outputs(directory) == outputs(whole.directory)


def test_without_observers_a_removed_line_is_logged(tmp_path: Path, caplog) -> None:
    directory = crashed_run(tmp_path)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b'{"seq"')
    federation("fedasmu").resume(directory)
    assert "the last one incomplete" in caplog.text


def test_a_run_that_cannot_be_resumed_is_one_sentence(tmp_path: Path) -> None:
    finished = federation("fedavg", until=20.0).run(out=tmp_path / "done")
    with pytest.raises(RunError, match="already finished"):
        federation("fedavg", until=20.0).resume(finished.directory)
    directory = crashed_run(tmp_path)
    with pytest.raises(RunError, match=r"another configuration \(method.name\); build"):
        federation("fedavg").resume(directory)
    for path in (directory / "checkpoint").iterdir():
        (path / "checksums.json").write_text("{}")
    with pytest.raises(RunError, match="has no checkpoint to resume from"):
        federation("fedasmu").resume(directory)


@pytest.mark.parametrize("spoil", ["drop", "shape", "type"])
def test_a_checkpoint_of_another_model_is_one_sentence_and_the_log_stays(spoil: str, tmp_path: Path) -> None:
    directory = crashed_run(tmp_path)
    tree = checkpoint.copy_arrays(checkpoint.read(directory).tree)
    if spoil == "drop":
        del tree["coordinator"]
    else:
        version = tree["coordinator"]["server"]["store"][0]
        version[1] = version[1][:-1] if spoil == "shape" else version[1].astype(np.int32)
    for _ in range(2):
        checkpoint.write(directory, tree)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b"more")
    before = (directory / "events.jsonl").read_bytes()
    with pytest.raises(RunError, match="a checkpoint of another model or version"):
        federation("fedasmu").resume(directory)
    assert (directory / "events.jsonl").read_bytes() == before


def test_a_checkpoint_keeps_every_value_and_array_exactly(tmp_path: Path) -> None:
    shared = np.arange(5, dtype=np.float32)
    tree = {"a": {"x": shared, "y": [1, 0.1, None, "s", {"z": shared}]}, "n": np.float64(0.3), "e": np.zeros((0, 3))}
    checkpoint.write(tmp_path, tree | logs(tmp_path))
    back, problems, useless = checkpoint.read(tmp_path)
    assert problems == useless == []
    assert back["a"]["y"][:4] == [1, 0.1, None, "s"] and back["n"] == 0.3 and back["e"].shape == (0, 3)
    np.testing.assert_array_equal(back["a"]["x"], shared)
    np.testing.assert_array_equal(back["a"]["y"][4]["z"], shared)
    assert back["a"]["x"] is back["a"]["y"][4]["z"], "a shared array stays shared"
    mine = checkpoint.copy_arrays(back)
    assert mine["a"]["x"] is mine["a"]["y"][4]["z"]
    mine["a"]["x"][0] = 7.0
    assert back["a"]["x"][0] == 0.0
    assert len(list((tmp_path / "checkpoint" / "000001").iterdir())) == 3


def logs(directory: Path) -> dict:
    """Make empty logs and return their position for a checkpoint."""
    for name in ("events", "metrics"):
        (directory / f"{name}.jsonl").touch()
    return {"log": {"events": 0, "metrics": 0, "seq": 0}}


def test_a_half_written_checkpoint_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / ".writing-1").mkdir(parents=True)
    checkpoint.write(tmp_path, {})
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["000001"]


def test_a_damaged_checkpoint_does_not_displace_an_intact_one(tmp_path: Path) -> None:
    for value in range(3):
        checkpoint.write(tmp_path, {"value": value} | logs(tmp_path))
    (tmp_path / "checkpoint" / "000003" / "state.json").write_text("{}")
    found = checkpoint.read(tmp_path)
    assert found.tree["value"] == 1 and len(found.problems) == 1
    found.remove_damaged()
    checkpoint.write(tmp_path, {"value": 9})
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["000002", "000003"]


def test_a_checkpoint_takes_no_second_copy_of_its_arrays(tmp_path: Path) -> None:
    one, live, most = np.zeros(2**18, np.float32), 0, 0

    def load() -> np.ndarray:
        nonlocal live, most
        array = one + 1.0
        live, most = live + 1, max(most, live + 1)
        weakref.finalize(array, gone)
        return array

    def gone() -> None:
        nonlocal live
        live -= 1

    tree = {"arrays": [checkpoint.LazyArray(one.shape, one.dtype, load) for _ in range(20)]}
    checkpoint.write(tmp_path, tree | logs(tmp_path))
    assert most <= 2, "one is written while the next is loaded"
    assert all((array == 1.0).all() for array in checkpoint.read(tmp_path).tree["arrays"])


@pytest.mark.parametrize("method", ["asofed", "feddyn"])
def test_spilled_device_memories_are_resumed(method: str, tmp_path: Path) -> None:
    class SpillWatcher(Observer):
        """Notes whether device memories are in files."""

        def __init__(self, directory: Path) -> None:
            self.folder, self.spilled = directory / "devices", False

        def on_event(self, event: dict) -> None:
            self.spilled |= self.folder.is_dir() and any(self.folder.iterdir())

    def network() -> nn.Module:  # 300 KB per vector in a device memory
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def wide(megabytes: int = 1) -> Federation:
        run = {"executor": "serial", "per_round": 4, "in_flight": 8, "until": 150.0, "checkpoint_every": 17.0}
        run |= {"device_memory_mb": megabytes}
        return Federation(method=method, seed=3, model=network, run=run, **SMALL)

    roomy, first, second = SpillWatcher(tmp_path / "whole"), *(SpillWatcher(tmp_path / "cut") for _ in range(2))
    whole = wide(512).run(out=tmp_path / "whole", observers=[roomy])
    assert not roomy.spilled
    with pytest.raises(CrashError):
        wide().run(out=tmp_path / "cut", observers=[first, Crash(35)])
    assert first.spilled
    wide().resume(tmp_path / "cut", observers=[second])
    assert second.spilled
    assert outputs(tmp_path / "cut") == outputs(whole.directory)


def test_only_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for value in range(4):
        checkpoint.write(tmp_path, {"value": value})
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["000003", "000004"]
