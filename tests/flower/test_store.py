"""A device's folder survives restarts, belongs to one session, and is replaced as a whole."""

import os
import re
import stat
from pathlib import Path

import numpy as np

from freshet.flower.device import KEPT_SESSIONS, DeviceFolder, DeviceRecord

MEMORY = {"q": np.arange(4.0), "last": 3, "name": "x"}


def test_memory_comes_back_after_a_restart(tmp_path: Path) -> None:
    DeviceFolder(tmp_path / "d", "s").write(DeviceRecord(dict(MEMORY), "t", {"w": np.ones(3, np.float32)}))
    kept = DeviceFolder(tmp_path / "d", "s").read()
    assert np.array_equal(kept.memory["q"], MEMORY["q"]) and kept.memory["last"] == 3
    assert kept.ticket == "t"
    assert kept.answer is not None and np.array_equal(kept.answer["w"], np.ones(3, np.float32))


def test_another_session_begins_with_nothing(tmp_path: Path) -> None:
    DeviceFolder(tmp_path, "one").write(DeviceRecord(dict(MEMORY), "t"))
    DeviceFolder(tmp_path, "one").write_paused("t", {"epoch": 1})
    other = DeviceFolder(tmp_path, "two")
    assert other.read() == DeviceRecord({}) and other.read_paused("t") is None


def test_a_paused_trip_is_found_by_its_ticket_only(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    assert folder.read_paused("t") is None
    folder.write_paused("t", {"epoch": 1, "weights": np.ones(2)})
    found = folder.read_paused("t")
    assert found is not None and found["epoch"] == 1 and folder.read_paused("other") is None


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    folder.write(DeviceRecord(dict(MEMORY)))
    (file,) = tmp_path.glob("memory.*")
    for damaged in (b"", file.read_bytes()[:-5], b"\x80\x04\x95 a pickle", b"{}"):
        file.write_bytes(damaged)
        assert folder.read() == DeviceRecord({})


def test_nothing_is_left_beside_the_files(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    for number in range(3):
        folder.write(DeviceRecord({"n": number}))
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"memory\.[0-9a-f]{16}\.safetensors", file.name)


def test_only_its_owner_reads_what_a_device_remembers(tmp_path: Path) -> None:
    made = tmp_path / "memory" / "node_0"
    (made / "flwr").mkdir(parents=True)  # as Flower does, before any trip
    before = os.umask(0o022)
    try:
        folder = DeviceFolder(made, "s")
        folder.write(DeviceRecord(dict(MEMORY)))
        folder.write_paused("t", {"epoch": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in made.glob("*.safetensors")] == [0o600] * 2


def test_two_runs_on_one_device_do_not_wipe_each_others_memory(tmp_path: Path) -> None:
    one, two = DeviceFolder(tmp_path / "d", "one"), DeviceFolder(tmp_path / "d", "../two")
    for trip in range(3):
        for folder, name in ((one, "one"), (two, "two")):
            assert folder.read().memory.get("trips", 0) == trip
            folder.write(DeviceRecord({"trips": trip + 1}, name))
            folder.write_paused(name, {"epoch": trip})
    assert (one.read().ticket, two.read().ticket) == ("one", "two")
    assert one.read_paused("one") == two.read_paused("two") == {"epoch": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_the_memory_of_old_runs_goes(tmp_path: Path) -> None:
    for number in range(3 * KEPT_SESSIONS):
        folder = DeviceFolder(tmp_path, str(number))
        folder.write(DeviceRecord({"n": number}))
        folder.write_paused("t", {"n": number})
        for path in tmp_path.iterdir():  # all are a minute older when the next run comes
            os.utime(path, (path.stat().st_atime - 60, path.stat().st_mtime - 60))
    assert len(list(tmp_path.iterdir())) == 2 * KEPT_SESSIONS
    kept = [DeviceFolder(tmp_path, str(number)).read().memory.get("n") for number in range(3 * KEPT_SESSIONS)]
    assert kept == [None] * 2 * KEPT_SESSIONS + list(range(2 * KEPT_SESSIONS, 3 * KEPT_SESSIONS))
