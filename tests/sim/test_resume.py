"""A run that was stopped anywhere goes on as if nothing had happened: the same log, the same model, bit for bit."""

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
from freshet.sim.device_memory import DeviceStore

SMALL = {
    "training": {"epochs": 3, "batch_size": 20},
    "data": {"train_samples": 300, "test_samples": 100},
    "fleet": {"devices": 12, "ratio": 8, "loss": 0.05, "on_seconds": 200.0, "off_seconds": 40.0},
}
METHODS = [
    "fedasmu",
    "fedasmu-course",
    "fedssmu-course",
    "fedssmu",
    "fedbuff",
    "port",
    "moon",
    "feddyn",
    "asofed",
    "fedavg",
]


class CrashError(Exception):
    pass


class Crash(Observer):
    """Ends a run abruptly when so many events have been written."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.said: list[str] = []

    def on_event(self, event: dict) -> None:
        self.left -= 1
        if self.left == 0:
            raise CrashError

    def on_message(self, message: str) -> None:
        self.said.append(message)


def federation(method: str, until: float = 150.0, every: float = 17.0) -> Federation:
    run = {"executor": "serial", "per_round": 4, "in_flight": 8, "until": until, "checkpoint_every": every}
    options = {"name": method} | ({"K": 3} if method in ("fedbuff", "port") else {})
    return Federation(method=options, seed=3, run=run, **SMALL)


def traces(directory: Path) -> tuple[bytes, str, list]:
    summary = json.loads((directory / "summary.json").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row.pop("wall_seconds") >= 0
    return (directory / "events.jsonl").read_bytes(), summary["weights_sha256"], rows


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_crashes_again_and_again_ends_as_the_uninterrupted_one(method: str, tmp_path: Path) -> None:
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
    assert traces(directory) == traces(whole.directory)
    assert audit(RunDirectory(directory)).passed
    assert len(list((directory / "checkpoint").iterdir())) == 1, "a finished run keeps its last checkpoint only"


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
    assert traces(directory) == traces(whole.directory)


def _newest(directory: Path) -> int:
    folder = directory / "checkpoint"
    return max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=0) if folder.is_dir() else 0


def stopped(tmp_path: Path, after: int = 70) -> Path:
    with pytest.raises(CrashError):
        federation("fedasmu").run(out=tmp_path / "cut", observers=[Crash(after)])
    return tmp_path / "cut"


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(tmp_path: Path) -> None:
    whole, directory = federation("fedasmu").run(out=tmp_path / "whole"), stopped(tmp_path)
    newest = directory / "checkpoint" / f"{_newest(directory):06d}"
    content = bytearray((newest / "arrays.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "arrays.safetensors").write_bytes(content)
    watcher = Crash(10**9)
    federation("fedasmu").resume(directory, observers=[watcher])
    assert any("is damaged (arrays.safetensors does not match its checksum)" in said for said in watcher.said)
    assert traces(directory) == traces(whole.directory)


def test_an_incomplete_last_line_is_cut_off_and_said(tmp_path: Path) -> None:
    whole, directory = federation("fedasmu").run(out=tmp_path / "whole"), stopped(tmp_path)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b'{"seq": 9999, "time": 1')
    watcher = Crash(10**9)
    federation("fedasmu").resume(directory, observers=[watcher])
    assert any("the last one incomplete" in said and "cut off" in said for said in watcher.said)
    assert traces(directory) == traces(whole.directory)


def test_a_log_that_was_cut_before_the_newest_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    whole, directory = federation("fedasmu").run(out=tmp_path / "whole"), stopped(tmp_path)
    log = directory / "events.jsonl"
    newest = json.loads((directory / "checkpoint" / f"{_newest(directory):06d}" / "state.json").read_text())
    os.truncate(log, newest["state"]["log"]["events"] - 1)
    watcher = Crash(10**9)
    federation("fedasmu").resume(directory, observers=[watcher])
    assert any("events.jsonl was cut off before it" in said for said in watcher.said)
    assert traces(directory) == traces(whole.directory)


def test_without_anybody_who_watches_a_cut_is_said_in_the_log_of_the_process(tmp_path: Path, caplog) -> None:
    directory = stopped(tmp_path)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b'{"seq"')
    federation("fedasmu").resume(directory)
    assert "the last one incomplete" in caplog.text


def test_what_cannot_be_resumed_is_one_sentence(tmp_path: Path) -> None:
    finished = federation("fedavg", until=20.0).run(out=tmp_path / "done")
    with pytest.raises(RunError, match="already finished"):
        federation("fedavg", until=20.0).resume(finished.directory)
    directory = stopped(tmp_path)
    with pytest.raises(RunError, match=r"another configuration \(method.name\); build"):
        federation("fedavg").resume(directory)
    for path in (directory / "checkpoint").iterdir():
        (path / "checksums.json").write_text("{}")
    with pytest.raises(RunError, match="has no checkpoint to resume from"):
        federation("fedasmu").resume(directory)


@pytest.mark.parametrize("spoil", ["drop", "shape", "type"])
def test_a_checkpoint_of_another_model_is_one_sentence_and_the_log_stays(spoil: str, tmp_path: Path) -> None:
    directory = stopped(tmp_path)
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
    assert back["a"]["x"] is back["a"]["y"][4]["z"], "one array stays one"
    mine = checkpoint.copy_arrays(back)
    assert mine["a"]["x"] is mine["a"]["y"][4]["z"]
    mine["a"]["x"][0] = 7.0
    assert back["a"]["x"][0] == 0.0
    assert len(list((tmp_path / "checkpoint" / "000001").iterdir())) == 3


def logs(directory: Path) -> dict:
    """Empty logs, and a checkpoint's word on them."""
    for name in ("events", "metrics"):
        (directory / f"{name}.jsonl").touch()
    return {"log": {"events": 0, "metrics": 0, "seq": 0}}


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / ".writing-1").mkdir(parents=True)
    checkpoint.write(tmp_path, {})
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["000001"]


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
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
    assert most <= 2, "one at a time, while the next is fetched"
    assert all((array == 1.0).all() for array in checkpoint.read(tmp_path).tree["arrays"])


@pytest.mark.parametrize("method", ["asofed", "feddyn"])
def test_memories_on_disk_are_resumed_too(method: str, tmp_path: Path, monkeypatch) -> None:
    spilled, save = [], DeviceStore._save
    monkeypatch.setattr(DeviceStore, "_save", lambda *a: (spilled.append(a[1]), save(*a)))

    def network() -> nn.Module:  # 300 KB for each vector that a device keeps
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def wide(megabytes: int = 1) -> Federation:
        run = {"executor": "serial", "per_round": 4, "in_flight": 8, "until": 150.0, "checkpoint_every": 17.0}
        run |= {"device_memory_mb": megabytes}
        return Federation(method=method, seed=3, model=network, run=run, **SMALL)

    whole = wide(512).run(out=tmp_path / "whole")
    assert not spilled
    with pytest.raises(CrashError):
        wide().run(out=tmp_path / "cut", observers=[Crash(35)])
    assert spilled
    spilled.clear()
    wide().resume(tmp_path / "cut")
    assert spilled
    assert traces(tmp_path / "cut") == traces(whole.directory)


def test_only_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for value in range(4):
        checkpoint.write(tmp_path, {"value": value})
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["000003", "000004"]
