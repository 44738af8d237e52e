"""A device's folder survives restarts, belongs to one session, and is replaced as a whole."""

from pathlib import Path

import numpy as np

from freshet.flower.store import DeviceFolder, Kept

MEMORY = {"q": np.arange(4.0), "last": 3, "name": "x"}


def test_memory_comes_back_after_a_restart(tmp_path: Path) -> None:
    DeviceFolder(tmp_path / "d", "s").write(Kept(dict(MEMORY), "t", {"w": np.ones(3, np.float32)}))
    kept = DeviceFolder(tmp_path / "d", "s").read()
    assert np.array_equal(kept.memory["q"], MEMORY["q"]) and kept.memory["last"] == 3
    assert kept.ticket == "t"
    assert kept.answer is not None and np.array_equal(kept.answer["w"], np.ones(3, np.float32))


def test_another_session_begins_with_nothing(tmp_path: Path) -> None:
    DeviceFolder(tmp_path, "one").write(Kept(dict(MEMORY), "t"))
    DeviceFolder(tmp_path, "one").pause("t", {"epoch": 1})
    other = DeviceFolder(tmp_path, "two")
    assert other.read() == Kept({}) and other.paused("t") is None


def test_a_paused_trip_is_found_by_its_ticket_only(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    assert folder.paused("t") is None
    folder.pause("t", {"epoch": 1, "weights": np.ones(2)})
    found = folder.paused("t")
    assert found is not None and found["epoch"] == 1 and folder.paused("other") is None


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    folder.write(Kept(dict(MEMORY)))
    file = tmp_path / "memory.safetensors"
    for damaged in (b"", file.read_bytes()[:-5], b"\x80\x04\x95 a pickle", b"{}"):
        file.write_bytes(damaged)
        assert folder.read() == Kept({})


def test_nothing_is_left_beside_the_files(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    for number in range(3):
        folder.write(Kept({"n": number}))
    assert [path.name for path in tmp_path.iterdir()] == ["memory.safetensors"]
