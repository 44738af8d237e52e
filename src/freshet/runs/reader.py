"""Read a run directory. Every other reader (reports, audits, results, the archive) goes through this module.

Nothing in a run directory is trusted. Files are parsed as TOML, JSON or safetensors and never evaluated, code that they
name is not imported, and every read is bounded.
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freshet.errors import RunError
from freshet.files import open_regular, read_regular, reason
from freshet.runs import segments
from freshet.runs.records import parse_line
from freshet.runs.segments import LONGEST_LINE
from freshet.runs.world import RunWorld, read_world

if TYPE_CHECKING:  # the command answers `freshet --help` without numpy
    from numpy.typing import NDArray

    from freshet.core.vectors import Vector

Record = dict[str, Any]
#: Called with the number of bytes that were just read, for a progress bar.
OnBytes = Callable[[int], None]

EVENTS = segments.LIVE
CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
MODEL, BEST, CHECKPOINTS = "model.safetensors", "best.safetensors", "checkpoint"
#: How the files of a deployment's journal begin, beside its checkpoints.
JOURNAL = "journal-"
#: Statuses of a run that has done all it was asked to do. A grid does not run it again.
ENDED = ("finished", "diverged", "stopped")


def ignore_bytes(count: int) -> None:
    """The ``OnBytes`` that does nothing."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / CONFIG).is_file()


def same_class(name: str, other: str) -> bool:
    """Whether two ``module:Class`` names may mean the same class. The module may have moved since."""
    return ":" in name and name.rpartition(":")[2] == other.rpartition(":")[2]


def check_tables(path: Path, tables: Record) -> Record:
    """The tables of settings; raises if one is no table."""
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise RunError(f"{path} cannot be used: {section[:40]} is not a table of settings")
    return tables


class RunDirectory:
    """A run directory, old or new, simulated or real."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise RunError(f"{directory} is not a run directory: the folder does not exist")
        if not is_run(self.directory):
            raise RunError(f"{directory} is not a run directory: it has no {CONFIG}")

    # ---- settings

    def config(self) -> Record:
        """The tables of config.toml."""
        path = self.directory / CONFIG
        return check_tables(path, self._parse(path, lambda content: tomllib.loads(content.decode())))

    def method(self) -> str:
        """The name of the method; ``module:Class`` if it is not built in."""
        name = self.config().get("method", {}).get("name")
        if not isinstance(name, str):
            raise RunError(f"{self.directory}/{CONFIG} does not name a method")
        return name

    def trusted_config(self, method: str | None) -> Record:
        """The tables of config.toml, where the method is built in or is the one that the user names here.

        A method that only config.toml names is never imported: the file may come from anybody.
        """
        from freshet.methods import builtin_about, class_and_preset

        tables, name = self.config(), self.method()
        if builtin_about(name) is None:
            if method is None and name.startswith("custom:"):
                class_and_preset(name)  # raises an error that says how to resume it
            if method is None:
                raise RunError(
                    f"{self.directory} names {name}, which is not built in and is not imported automatically; "
                    f"if you trust it, name it yourself: --method {name}"
                )
            if not same_class(name, method):
                raise RunError(f"{self.directory} was made with another configuration: its method is {name}")
            tables["method"]["name"] = method
        return tables

    # ---- results

    def has_summary(self) -> bool:
        """Whether summary.json exists. It does not while the run is going, or after it was killed."""
        return (self.directory / SUMMARY).is_file()

    def summary(self) -> Record:
        """summary.json; raises if there is none."""
        if not self.has_summary():
            raise RunError(f"{self.directory} has no {SUMMARY}: the run is still going, or was killed")
        return self._parse(self.directory / SUMMARY, json.loads)

    def finished(self) -> bool:
        """Whether the run has ended, including one that diverged or was stopped."""
        return self.has_summary() and self.summary().get("status") in ENDED

    def check_resumable(self, longer: bool = False) -> None:
        """Raise if the run cannot be resumed.

        A stopped run can be. A finished one can be if it gets a later end (``longer``). A diverged one cannot.
        """
        if not self.finished():
            return
        summary = self.summary()
        if summary["status"] == "diverged":
            raise RunError(
                f"{self.directory} diverged at {summary.get('diverged')} s and cannot be resumed; run it again with a "
                'smaller training.lr, or with run.diverged = "continue"'
            )
        if summary["status"] == "finished" and not longer:
            raise RunError(f"{self.directory} is already finished; give it a later end with --until, as in --until 20m")

    def is_deployed(self) -> bool:
        """Whether a deployment made this run: beside its checkpoints it keeps a journal."""
        return any((self.directory / CHECKPOINTS).glob(f"{JOURNAL}*"))

    def resume_command(self) -> str:
        """The command that resumes the run."""
        if not self.is_deployed():
            return f"freshet resume {self.directory}"
        folder = self.directory.parent
        return f"freshet deploy server {folder if (folder / 'server.toml').is_file() else 'DIR'}"

    def has_checkpoint(self) -> bool:
        """Whether the run has written a checkpoint; it may be damaged."""
        return any((self.directory / CHECKPOINTS).glob("[0-9]*"))

    def world(self) -> RunWorld | None:
        """Fleet and data from world.json, or None if the run has none."""
        return read_world(self.directory)

    def weights(self, best: bool = False) -> "tuple[Vector, dict[str, NDArray[Any]]]":
        """The final model: its flat weight vector, and by name the frozen tensors that are not part of the vector.

        With ``best`` it is the model of the best test, if the run kept that.
        """
        import numpy as np
        from safetensors import SafetensorError, safe_open

        path = self.directory / (BEST if best else MODEL)
        if best and not path.is_file():
            raise RunError(f'{self.directory} has no best model; make the run with run.keep = "best"')
        try:
            with safe_open(path, framework="numpy") as file:
                order = json.loads((file.metadata() or {})["order"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            parts = [_flatten(tensors.pop(name), channels_last) for name, channels_last in order]
            return np.concatenate(parts, dtype=np.float32), tensors
        except KeyError as error:
            raise RunError(f"{path} cannot be used: {error.args[0]} is missing") from None
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise RunError(f"{path} cannot be used ({error})") from None

    # ---- logs

    def events(self, on_bytes: OnBytes = ignore_bytes) -> Iterator[Record]:
        """The events of the whole log in order, compressed segments first."""
        return self._records(EVENTS, on_bytes)

    def metrics(self) -> list[Record]:
        """The rows of metrics.jsonl."""
        return list(self._records(METRICS))

    def log_lines(self, start: int = 0) -> Iterator[bytes]:
        """The lines of the whole log from byte ``start`` on. Only the last one may be incomplete."""
        return segments.lines(self.directory / EVENTS, start)

    def log_size(self) -> int:
        """Uncompressed bytes of the whole log."""
        return segments.size(self.directory / EVENTS)

    def follow_metrics(self) -> "LineFollower":
        """A reader of metrics.jsonl while the run writes it."""
        return LineFollower(self.directory / METRICS)

    def _records(self, name: str, on_bytes: OnBytes = ignore_bytes) -> Iterator[Record]:
        path = self.directory / name
        if not path.is_file():
            raise RunError(f"{self.directory} has no {name}")
        try:
            for number, line in enumerate(segments.lines(path), 1):
                record = parse_line(line) if len(line) < LONGEST_LINE else None
                if record is None:
                    raise RunError(f"{path}, line {number}: is not a JSON object")
                on_bytes(len(line))
                yield record
        except OSError as error:
            raise RunError(f"{path} cannot be read ({reason(error)})") from None

    def _parse(self, path: Path, parse: Callable[[bytes], Any]) -> Record:
        """A file as a dict; any problem becomes one sentence."""
        try:
            found = parse(read_regular(path))
        except OSError as error:
            raise RunError(f"{path} cannot be read ({reason(error)})") from None
        except RecursionError:
            raise RunError(f"{path} cannot be read (it is nested too deeply)") from None
        except ValueError as error:
            raise RunError(f"{path} cannot be read ({error})") from None
        if not isinstance(found, dict):
            raise RunError(f"{path} does not hold a JSON object")
        return found


def _flatten(tensor: "NDArray[Any]", channels_last: bool) -> "NDArray[Any]":
    return (tensor.transpose(0, 2, 3, 1) if channels_last else tensor).reshape(-1)


class LineFollower:
    """Reads a JSON-lines file as it grows. Each call of ``read`` parses only the new, complete lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Record] = []
        #: Why reading stopped, if a line is damaged.
        self.note: str | None = None
        self._offset = 0
        self._line = 0

    def read(self) -> bool:
        """Read what is new; True if there was something. A file that was truncated is read again from the start."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size < self._offset:
            self.rows, self.note, self._offset, self._line = [], None, 0, 0
        if size == self._offset or self.note is not None:
            return False
        with open_regular(self.path) as file:
            file.seek(self._offset)
            content = file.read()
        complete = content.rfind(b"\n") + 1
        for line in content[:complete].splitlines():
            self._line += 1
            row = parse_line(line)
            if row is None:
                self.note = f"{self.path.name} is damaged at line {self._line}; what follows is not shown"
                break
            self.rows.append(row)
        self._offset += complete
        return complete > 0
