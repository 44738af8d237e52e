"""The journal: every complete entry is read again, in order, and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from freshet.flower.journal import Journal


def entries(folder: Path, start: int) -> list[int]:
    return [int(entry["n"]) for entry in Journal(folder).read(start)]


def filled(folder: Path, *lengths: int) -> tuple[Journal, list[int]]:
    """A journal with a checkpoint before each run of entries. Returns also the checkpoints' numbers."""
    journal, marks = Journal(folder), list[int]()
    for length in lengths:
        marks.append(journal.mark_checkpoint())
        for _ in range(length):
            journal.append({"n": journal.entries, "weights": np.arange(3, dtype=np.float32)})
    journal.sync()
    return journal, marks


def test_entries_after_each_kept_checkpoint_are_read(tmp_path: Path) -> None:
    _, marks = filled(tmp_path / "checkpoint", 2, 3, 0, 4)
    assert marks == [0, 2, 5, 5]
    assert entries(tmp_path / "checkpoint", 5) == [5, 6, 7, 8]
    assert entries(tmp_path / "checkpoint", 2) == list(range(2, 9)), "the newest checkpoint may be damaged"


def test_arrays_survive(tmp_path: Path) -> None:
    filled(tmp_path / "checkpoint", 1)
    [entry] = Journal(tmp_path / "checkpoint").read(0)
    assert entry["weights"].dtype == np.float32 and entry["weights"].tolist() == [0.0, 1.0, 2.0]


def test_entry_that_is_cut_off_anywhere_ends_the_journal(tmp_path: Path) -> None:
    filled(tmp_path / "checkpoint", 2)
    [path] = (tmp_path / "checkpoint").iterdir()
    content = path.read_bytes()
    for length in range(len(content) // 2, len(content)):
        path.write_bytes(content[:length])
        assert entries(tmp_path / "checkpoint", 0) == [0]
    path.write_bytes(content[:-1] + b"?")
    assert entries(tmp_path / "checkpoint", 0) == [0]


def test_entries_behind_a_damaged_one_are_never_read(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    filled(folder, 2, 2)
    first = folder / "journal-000000000000"
    first.write_bytes(first.read_bytes()[:-1])
    again = Journal(folder)
    assert [entry["n"] for entry in again.read(0)] == [0]
    again.begin_file()
    for number in (1, 2):
        again.append({"n": 10 * number})
    assert entries(folder, 0) == [0, 10, 20], "the file of the old entries 2 and 3 is gone"


def test_restarts_without_a_checkpoint_keep_the_files_of_the_last_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    filled(folder, 1)
    for _ in range(6):
        again = Journal(folder)
        list(again.read(0))
        again.begin_file()
        again.append({"n": again.entries})
    assert entries(folder, 0) == list(range(7))


def test_old_files_are_removed(tmp_path: Path) -> None:
    filled(tmp_path / "checkpoint", *[1] * 10)
    assert len(list((tmp_path / "checkpoint").iterdir())) == 3


def test_missing_journal_is_reported(tmp_path: Path) -> None:
    filled(tmp_path / "checkpoint", 1)
    with pytest.raises(ValueError, match="its journal, journal-000000000007, is missing"):
        entries(tmp_path / "checkpoint", 7)


def test_link_is_not_followed(tmp_path: Path) -> None:
    filled(tmp_path / "checkpoint", 1)
    [path] = (tmp_path / "checkpoint").iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="it is a link"):
        entries(tmp_path / "checkpoint", 0)
