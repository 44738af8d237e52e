"""Kept runs: settings, tests, world and summary of many runs, without logs and models, in two JSON-lines files.

``runs.jsonl`` has one line per run: its name, its tables of settings, its tests as columns and its summary.
``worlds.jsonl`` has one line per distinct world, which the runs name by its hash. A line begins with the SHA-256 of its
own rest, so that a changed line is noticed. The four files of a run directory come back byte for byte
(``restore_files``).

A kept run has the path that its directory would have: ``results/lenet-fmnist/runs/KEY`` is the line ``runs/KEY`` of
``results/lenet-fmnist/runs.jsonl``. ``open_run`` opens either.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w

from freshet.errors import RunError
from freshet.files import read_regular, reason, write_atomically
from freshet.runs.reader import CONFIG, METRICS, SUMMARY, LineFollower, Record, RunDirectory, check_tables, is_run
from freshet.runs.records import format_line, parse_line
from freshet.runs.world import WORLD, RunWorld, parse_world

RUNS, WORLDS = "runs.jsonl", "worlds.jsonl"
KEPT_FILES = (CONFIG, METRICS, SUMMARY, WORLD)
#: What of a world follows from the method and its settings. It stands with the run; the rest is shared by many runs.
OF_THE_RUN = ("curves", "aside")
#: The longest file of kept runs that is read.
LIMIT = 1 << 30
#: How many folders above a path may hold its line.
DEPTH = 6
_HASH_HEAD, _HASH_TAIL = b'{"sha256":"', b'",'
_RUN_KEYS = ("run", "config", "metrics", "summary")


# ---- from a run directory to a line and back


def pack(run: RunDirectory, name: str) -> tuple[Record, Record | None]:
    """The line of a run, and the part of its world that it shares with others (None if it has no world)."""
    if isinstance(run, KeptRun):
        return run.record | {"run": name}, run.shared_world
    text = _text(run.directory / CONFIG)
    note = text.partition("\n")[0].removeprefix("# ") if text.startswith("# ") else ""
    columns, more = as_columns(run.metrics())
    record: Record = {"run": name} | ({"note": note} if note else {})
    record |= {"config": run.config(), "summary": run.summary(), "metrics": columns} | ({"more": more} if more else {})
    if not (run.directory / WORLD).is_file():
        return record, None
    world = _object(run.directory / WORLD)
    shared = {key: value for key, value in world.items() if key not in OF_THE_RUN}
    own = {key: world[key] for key in OF_THE_RUN if key in world}
    return record | own | {"world": _digest(_body(shared))}, shared


def as_columns(rows: Sequence[Record]) -> tuple[dict[str, list[Any]], dict[str, Record]]:
    """Tests as columns of the keys that all of them have, and by the place of a test what it has besides."""
    common = [key for key in rows[0] if all(key in row for row in rows)] if rows else []
    more = {
        str(place): {key: value for key, value in row.items() if key not in common}
        for place, row in enumerate(rows)
        if len(row) > len(common)
    }
    return {key: [row[key] for row in rows] for key in common}, more


def as_rows(columns: Mapping[str, Sequence[Any]], more: Mapping[str, Record]) -> list[Record]:
    """The tests again, one record each."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [row | more.get(str(place), {}) for place, row in enumerate(rows)]


def whole_world(record: Mapping[str, Any], shared: Mapping[str, Any]) -> Record:
    """The content of world.json, in the order in which a run writes it."""
    found = {**shared, **{key: record[key] for key in OF_THE_RUN if key in record}}
    known = [field.name for field in fields(RunWorld) if field.name in found]
    return {key: found[key] for key in [*known, *(key for key in found if key not in known)]}


def restore_files(run: "KeptRun") -> dict[str, bytes]:
    """The files of the run directory that this line was made from, byte for byte."""
    note = run.record.get("note")
    found = {
        CONFIG: (f"# {note}\n" if note else "").encode() + tomli_w.dumps(run.config()).encode(),
        METRICS: b"".join(format_line(row) for row in run.metrics()),
        SUMMARY: (json.dumps(run.summary(), indent=2) + "\n").encode(),
    }
    if run.shared_world is not None:
        found[WORLD] = (json.dumps(whole_world(run.record, run.shared_world)) + "\n").encode()
    return found


# ---- reading


class KeptRun(RunDirectory):
    """A run of which only a line is kept. It has no log and no model, and reads like a run directory without them."""

    def __init__(self, path: Path, record: Record, shared_world: Record | None) -> None:
        self.directory, self.record, self.shared_world = path, record, shared_world

    def config(self) -> Record:
        return check_tables(self.directory / CONFIG, self.record["config"])

    def has_summary(self) -> bool:
        return True

    def summary(self) -> Record:
        return dict(self.record["summary"])

    def metrics(self) -> list[Record]:
        return as_rows(self.record["metrics"], self.record.get("more", {}))

    def follow_metrics(self) -> LineFollower:
        follower = LineFollower(self.directory / METRICS)  # the file does not exist: nothing is read later
        follower.rows = self.metrics()
        return follower

    def world(self) -> RunWorld | None:
        if self.shared_world is None:
            return None
        return parse_world(whole_world(self.record, self.shared_world), self.directory / WORLD)


def open_run(path: str | Path) -> RunDirectory:
    """The run directory at this path, or the kept run that has this path."""
    path = Path(path)
    if not is_run(path):
        for folder, name in _homes(path):
            found = kept_runs(folder).get(name)
            if found is not None:
                return found
    return RunDirectory(path)


def runs_below(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Paths of the kept runs in a folder, at most this deep. The folder may exist only in the names of the runs."""
    found = []
    for home, inside in _homes(folder):
        parts = () if inside == "." else Path(inside).parts
        for name in kept_runs(home):
            place = Path(name).parts
            if place[: len(parts)] == parts and 0 < len(place) - len(parts) <= depth:
                found.append(home / name)
    return sorted(found)


def kept_runs(folder: Path) -> dict[str, KeptRun]:
    """The kept runs of a folder by name; empty if it keeps none. A line that was changed raises."""
    stamps = []
    for name in (RUNS, WORLDS):
        try:
            facts = (folder / name).stat()
        except OSError:
            facts = None
        stamps.append(None if facts is None else (facts.st_mtime_ns, facts.st_size, facts.st_ino))
    return _read(folder, tuple(stamps)) if stamps[0] else {}


def _homes(path: Path) -> list[tuple[Path, str]]:
    """The folders with kept runs at a path or above it, each with the rest of the path."""
    above = [path, *path.parents][: DEPTH + 1]
    return [(folder, path.relative_to(folder).as_posix()) for folder in above if (folder / RUNS).is_file()]


@lru_cache(maxsize=64)
def _read(folder: Path, stamps: tuple[Any, ...]) -> dict[str, KeptRun]:
    worlds = {digest: world for _, digest, world in _lines(folder / WORLDS)} if (folder / WORLDS).is_file() else {}
    runs: dict[str, KeptRun] = {}
    for number, _, record in _lines(folder / RUNS):
        problem = _problem(record, worlds)
        if problem:
            raise RunError(f"{folder / RUNS}, line {number}: {problem}")
        name = str(record["run"])
        if name in runs:
            raise RunError(f"{folder / RUNS}, line {number}: {name[:80]} is kept twice; remove one of the lines")
        shared = None if record.get("world") is None else worlds[record["world"]]
        runs[name] = KeptRun(folder / name, record, shared)
    return runs


def _problem(record: Record, worlds: Mapping[str, Record]) -> str | None:
    """What is wrong with the line of a run, or None."""
    name, more = record.get("run"), record.get("more", {})
    missing = [key for key in _RUN_KEYS if key not in record]
    if missing:
        return f"{missing[0]} is missing"
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        return "run must be a path inside the folder"
    if not all(isinstance(record[key], dict) for key in _RUN_KEYS[1:]) or not isinstance(more, dict):
        return "config, metrics, more and summary must be objects"
    lengths = {len(column) if isinstance(column, list) else -1 for column in record["metrics"].values()}
    if len(lengths) > 1 or -1 in lengths or not all(isinstance(each, dict) for each in more.values()):
        return "metrics must be columns of equal length"
    if record.get("world") is not None and record["world"] not in worlds:
        return f"its world is not in {WORLDS}; restore that file"
    return None


def _lines(path: Path) -> Iterable[tuple[int, str, Record]]:
    """The number, the hash and the content of each line; a line that is not what its hash says raises."""
    try:
        content = read_regular(path, LIMIT)
    except OSError as error:
        raise RunError(f"{path} cannot be read ({reason(error)})") from None
    for number, line in enumerate(content.splitlines(), 1):
        digest, body = _split(line)
        record = parse_line(body)
        if record is None or _digest(body) != digest:
            raise RunError(
                f"{path}, line {number}: was changed after it was written; restore it, or keep the run again"
            )
        yield number, digest, record


def _text(path: Path) -> str:
    try:
        return read_regular(path, LIMIT).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read ({error})") from None


def _object(path: Path) -> Record:
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} does not hold a JSON object")
    return found


# ---- writing


def keep(runs: Mapping[str, RunDirectory], folder: Path) -> list[Path]:
    """Add runs to the kept ones of a folder, by name; a run of the same name is replaced. Returns their paths."""
    packed = {name: pack(run, name) for name, run in runs.items()}
    present = {name: (run.record, run.shared_world) for name, run in kept_runs(folder).items()}
    _write(folder, present | packed)
    return [folder / name for name in runs]


def forget(names: Iterable[str], folder: Path) -> None:
    """Remove kept runs by name."""
    gone = set(names)
    present = kept_runs(folder)
    if not gone.isdisjoint(present):
        _write(folder, {name: (run.record, run.shared_world) for name, run in present.items() if name not in gone})


def _write(folder: Path, runs: Mapping[str, tuple[Record, Record | None]]) -> None:
    """Write both files, the worlds first: a run never names a world that is not there."""
    bodies = sorted({_body(world) for _, world in runs.values() if world is not None})
    lines = [_line(_body(runs[name][0])) for name in sorted(runs)]
    folder.mkdir(parents=True, exist_ok=True)
    if bodies:
        write_atomically(folder / WORLDS, b"".join(sorted(map(_line, bodies))))
    write_atomically(folder / RUNS, b"".join(lines))


def _body(record: Mapping[str, Any]) -> bytes:
    return format_line(dict(record)).rstrip(b"\n")


def _line(body: bytes) -> bytes:
    return _HASH_HEAD + _digest(body).encode() + _HASH_TAIL + body[1:] + b"\n"


def _split(line: bytes) -> tuple[str, bytes]:
    """The hash that a line begins with, and what it is the hash of."""
    start, end = len(_HASH_HEAD), len(_HASH_HEAD) + 64
    if not line.startswith(_HASH_HEAD) or line[end : end + 2] != _HASH_TAIL:
        return "", line
    return line[start:end].decode(errors="replace"), b"{" + line[end + 2 :]


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def unpack(runs: Iterable[KeptRun], into: Path) -> list[Path]:
    """Write kept runs as run directories, each under its name without the folders before it."""
    places = []
    for run in runs:
        place = into / run.directory.name
        place.mkdir(parents=True, exist_ok=True)
        for name, content in restore_files(run).items():
            write_atomically(place / name, content)
        places.append(place)
    return places
