"""The folder of a grid: DIR/runs/<key> (run directories) and DIR/failures/<key>.json (why a run crashed).

``archive_runs`` keeps runs of such folders in the compact files of an archive, and ``archived_runs`` finds them there.
"""

import fcntl
import json
import shutil
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from freshet.errors import FreshetError, RunError
from freshet.files import open_own, write_atomically, writing
from freshet.runs import checkpoint
from freshet.runs.kept_runs import forget, keep, runs_below
from freshet.runs.kept_runs import open_run as open_run
from freshet.runs.reader import RunDirectory, is_run

#: In an archive, the folder of runs that are over while others of their grid are missing.
UNFINISHED = "unfinished"


class State(StrEnum):
    """The state of a run. A run that diverged or was stopped (at its target, by an observer) is finished too: it would
    end there again."""

    MISSING = "missing"
    FINISHED = "finished"
    UNFINISHED = "unfinished"
    FAILED = "failed"


class Store:
    """The folder of a grid; its content decides what is left to do."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def directory(self, key: str) -> Path:
        """The run directory of this key."""
        return self.folder / "runs" / key

    def state(self, key: str) -> State:
        """The state of this run."""
        directory = self.directory(key)
        if _finished(directory):
            return State.FINISHED
        if self._failure(key).is_file():
            return State.FAILED
        return State.UNFINISHED if directory.is_dir() and any(directory.iterdir()) else State.MISSING

    def resumable(self, key: str) -> bool:
        """Whether an unfinished run has a checkpoint to resume from."""
        directory = self.directory(key)
        if not is_run(directory):
            return False
        try:
            checkpoint.read(directory)
        except RunError:
            return False
        return True

    def clear(self, key: str) -> None:
        """Remove the directory of an unfinished run; a finished one is never touched."""
        if _finished(self.directory(key)):
            raise RunError(f"{self.directory(key)} is finished and is not repeated")
        shutil.rmtree(self.directory(key), ignore_errors=True)

    def record_failure(self, key: str, error: Exception) -> str:
        """Record why a run crashed; return the sentence to show."""
        sentence = str(error) if isinstance(error, FreshetError) else f"{type(error).__name__}: {error}"
        record = {"error": sentence, "traceback": "".join(traceback.format_exception(error))}
        path = self._failure(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(record, indent=2) + "\n").encode())
        return sentence

    def error(self, key: str) -> str | None:
        """Why this run crashed, or None if it did not."""
        try:
            return str(json.loads(self._failure(key).read_text(encoding="utf-8"))["error"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return "the record of its failure cannot be read"

    def clear_failure(self, key: str) -> None:
        """Remove the record of a crash."""
        self._failure(key).unlink(missing_ok=True)

    def _failure(self, key: str) -> Path:
        return self.folder / "failures" / f"{key}.json"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder's lock: only one command works in a folder at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing(self.folder, "nothing was changed"):
            file = open_own(self.folder / ".lock", create=True)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"another freshet command is working in {self.folder}; wait for it to end") from None
            yield


def _finished(directory: Path) -> bool:
    try:
        return RunDirectory(directory).finished()
    except RunError:
        return False


# ---- archives


def finished_runs(folder: Path) -> list[Path]:
    """The directories of a grid's runs that have ended."""
    found = [run for run in sorted((folder / "runs").glob("*/")) if (run / "summary.json").is_file()]
    return [run for run in found if RunDirectory(run).finished()]


def archived_runs(folder: Path) -> list[Path]:
    """The runs of an archive, FOLDER/runs/KEY: kept ones, and directories that were not kept yet."""
    return sorted({*runs_below(folder / "runs", 1), *(folder / "runs").glob("*/")})


def archived_folders(folder: Path) -> list[Path]:
    """The folders in a folder of an archive, also those that exist only in the names of kept runs."""
    kept = {folder / path.relative_to(folder).parts[0] for path in runs_below(folder) if path.parent != folder}
    return sorted({*kept, *(folder.glob("*/") if folder.is_dir() else ())})


def archive_runs(runs: Sequence[Path], home: Path, inside: Path) -> list[Path]:
    """Keep runs in the files of ``home`` under INSIDE/runs/KEY, in place of other kept runs of that folder by this key.

    A run that was kept as unfinished (HOME/unfinished/KEY) is that no more. Returns the paths of the kept runs.
    """
    places = keep({(inside / "runs" / run.name).as_posix(): open_run(run) for run in runs}, home)
    forget((f"{UNFINISHED}/{run.name}" for run in runs), home)
    return places
