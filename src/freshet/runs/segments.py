"""The log of a run is one sequence of lines in one or more files, and only this module knows which:

    events-000001.jsonl.zst, events-000002.jsonl.zst, ..., events.jsonl

Places in the log are counted from the start of the whole, uncompressed, so that they stay what they are when a part of
the live file becomes a segment. That takes two steps, each atomic: the segment appears while the live file still holds
its lines, then the live file is replaced by its rest. Whoever reads in between passes over the segment; a resumed run
removes it.

Segments may come from anybody: they are decompressed as a stream, in little memory, up to the size that they announce.
"""

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from freshet.errors import ConfigError, RunError
from freshet.files import open_regular, reason, replacing

#: The file that a run writes to.
LIVE = "events.jsonl"
#: Bytes of the longest line of a log: an aggregation of a million devices fits.
LONGEST_LINE = 1 << 28
#: A segment of more bytes than this is refused if they are more than so many times those of its file.
ALWAYS, RATIO = 1 << 26, 1000
#: A line of more bytes than this is refused if they are more than so many times those of its segment: parsed, it would
#: take a dozen times as much memory.
LINE_ALWAYS, LINE_RATIO = 1 << 22, 20
#: Memory that a segment may ask for to be decompressed; ours ask for a quarter of it.
_WINDOW = 1 << 23
_LEVEL, _PORTION = 3, 1 << 17
_NAME = re.compile(r"events-([0-9]{6,12})\.jsonl\.zst")
_FIRST = re.compile(rb'\{"seq": ?([0-9]{1,15})[,}]')
_MISSING = "needs zstandard, which is not installed; install it: pip install 'freshet-fl[zst]'"


class DamagedSegment(RunError):
    """A segment that cannot be read to its end, or one that is missing."""


class Segment(NamedTuple):
    """A compressed part of a log: its bytes when decompressed, and the number of its first event."""

    path: Path
    size: int
    first: int


def rotation_bytes(megabytes: float) -> int:
    """The setting ``run.rotate_log`` in bytes (0: never)."""
    if megabytes and find_spec("zstandard") is None:
        raise ConfigError("run.rotate_log", _MISSING)
    return max(1, int(megabytes * 1e6)) if megabytes else 0


# ---- reading


def lines(live: Path, start: int = 0) -> Iterator[bytes]:
    """The lines of the whole log from a place on, as they are now; only the last one may be incomplete."""
    with open_regular(live) as file:  # before the segments: what is rotated from now on is still in this file
        for segment in _before(live, file):
            if start < segment.size:
                yield from _lines(segment, start)
            start = max(0, start - segment.size)
        file.seek(start)
        yield from _each_line(file)


def size(live: Path) -> int:
    """Bytes of the whole log, uncompressed."""
    with open_regular(live) as file:
        return sum(segment.size for segment in _before(live, file)) + file.seek(0, io.SEEK_END)


def live_start(live: Path) -> int:
    """Where in the whole log the live file begins."""
    with open_regular(live) as file:
        return sum(segment.size for segment in _before(live, file))


def check_position(live: Path, place: int, seq: int) -> None:
    """Raise ValueError unless the live file holds this place, after the event of this number."""
    with open_regular(live) as file:
        before = _before(live, file)
        start, first = place - sum(segment.size for segment in before), _first(file)
        if start < 0:
            raise ValueError(f"{live.name} was compressed beyond it")
        if file.seek(0, io.SEEK_END) < start:
            raise ValueError(f"{live.name} was cut off before it")
        file.seek(0)
        if before and first is not None and first - 1 + sum(part.count(b"\n") for part in _parts(file, start)) != seq:
            raise ValueError(f"{before[-1].path.name} and {live.name} do not follow each other")


def _paths(live: Path) -> list[Path]:
    """The segments beside a live file, in order."""
    if live.name != LIVE:
        return []
    found = (_NAME.fullmatch(path.name) for path in live.parent.iterdir())
    numbers = sorted({int(match[1]) for match in found if match})
    for expected, number in enumerate(numbers, 1):
        if number != expected:
            raise DamagedSegment(
                f"{_path(live, expected)} is missing, though there are later parts of the log; put it back"
            )
    return [_path(live, number) for number in numbers]


def _path(live: Path, number: int) -> Path:
    return live.with_name(f"events-{number:06d}.jsonl.zst")


def _before(live: Path, file: BinaryIO) -> list[Segment]:
    """The segments whose lines come before those of this live file."""
    segments, first = [_segment(path) for path in _paths(live)], _first(file)
    while segments and first is not None and segments[-1].first >= first:
        segments.pop()
    return segments


def _first(file: BinaryIO) -> int | None:
    """The number of the first event in a file, if there is one."""
    file.seek(0)
    match = _FIRST.match(file.read(64))
    return int(match[1]) if match else None


def _segment(path: Path) -> Segment:
    try:
        facts = path.stat()
        return _inspect(path, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise DamagedSegment(f"{path} cannot be read ({reason(error)})") from None


@lru_cache(10_000)
def _inspect(path: Path, inode: int, packed: int, changed: int) -> Segment:
    """What the beginning of a segment says; a segment never changes, so it is asked once."""
    if find_spec("zstandard") is None:
        raise RunError(f"{path} {_MISSING}")
    zstd = import_module("zstandard")
    with open_regular(path) as file:
        try:
            length = int(zstd.get_frame_parameters(file.read(18)).content_size)
        except zstd.ZstdError as error:
            raise DamagedSegment(f"{path} is damaged ({error})") from None
    if length == zstd.CONTENTSIZE_UNKNOWN:
        raise DamagedSegment(f"{path} is not a part of a log: it does not say how much it holds")
    _check_ratio(path, length, packed)
    with closing(_open(Segment(path, length, 0))) as reader:
        match = _FIRST.match(reader.read(64))
    if match is None:
        raise DamagedSegment(f"{path} is not a part of a log: it does not begin with an event")
    return Segment(path, length, int(match[1]))


def _check_ratio(path: Path, length: int, packed: int) -> None:
    if length > max(ALWAYS, RATIO * packed):
        raise DamagedSegment(f"{path} would grow to more than {RATIO:,} times its size; it is refused")


class _Unpacked(io.RawIOBase):
    """The bytes of a segment, decompressed as they are asked for; whatever is wrong with it is one sentence."""

    def __init__(self, segment: Segment) -> None:
        zstd = import_module("zstandard")
        self._path, self._left, self._error = segment.path, segment.size, zstd.ZstdError
        try:
            self._file = open_regular(segment.path)
        except OSError as error:
            raise DamagedSegment(f"{segment.path} cannot be read ({reason(error)})") from None
        self._stream = zstd.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
            self._file, _PORTION, read_across_frames=True
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = int(self._stream.readinto(buffer))
        except self._error as error:
            raise DamagedSegment(f"{self._path} is damaged ({error})") from None
        except OSError as error:
            raise DamagedSegment(f"{self._path} cannot be read ({reason(error)})") from None
        self._left -= count
        if self._left < 0 or (count == 0 and self._left):
            raise DamagedSegment(
                f"{self._path} is damaged (it holds {'more' if self._left < 0 else 'less'} than it says)"
            )
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(segment: Segment) -> io.BufferedReader:
    return io.BufferedReader(_Unpacked(segment), _PORTION)


def _lines(segment: Segment, start: int) -> Iterator[bytes]:
    longest = longest_line(segment.path.stat().st_size)
    with closing(_open(segment)) as file:
        for _ in _parts(file, start):
            pass
        for line in _each_line(file, longest):
            if not line.endswith(b"\n") or len(line) > longest:
                raise DamagedSegment(f"{segment.path} is damaged (a line without an end)")
            yield line


def longest_line(packed: int) -> int:
    """Bytes that a line of a segment may have whose file has so many."""
    return min(LONGEST_LINE, max(LINE_ALWAYS, LINE_RATIO * packed))


def _each_line(file: BinaryIO, longest: int | None = None) -> Iterator[bytes]:
    """The lines of a file, read many at a time; what is longer than ``longest`` is cut into pieces."""
    most = LONGEST_LINE if longest is None else longest
    while block := file.read(_PORTION):
        if not block.endswith(b"\n"):
            block += file.readline(max(0, most - len(block)))
        yield from io.BytesIO(block)


def _parts(file: BinaryIO, length: int) -> Iterator[bytes]:
    """The next so many bytes of a file, bit by bit."""
    while length and (part := file.read(min(length, _PORTION))):
        length -= len(part)
        yield part


# ---- writing


def rotate(live: Path, length: int) -> bool:
    """Turn so many bytes at the start of the live file (whole lines) into the next segment. False if they stay where
    they are: what shrinks beyond all measure would be taken for an attack when it is read."""
    try:
        _pack(live, length)
    except DamagedSegment:
        return False
    _drop_start(live, length)
    return True


def _pack(live: Path, length: int) -> None:
    zstd = import_module("zstandard")
    path = _path(live, len(_paths(live)) + 1)
    with open_regular(live, links=False) as source, replacing(path) as target:
        compressor = zstd.ZstdCompressor(level=_LEVEL, write_checksum=True)
        line = longest = 0
        with compressor.stream_writer(target, size=length, closefd=False) as packed:
            for part in _parts(source, length):
                packed.write(part)
                first, *others = map(len, part.split(b"\n"))
                longest = max(longest, line + first + 1, *others)
                line = others[-1] if others else line + first
        _check_ratio(path, length, target.tell())
        if longest > longest_line(target.tell()):
            raise DamagedSegment(f"{path} would hold a line that no reader takes")


def _drop_start(live: Path, length: int) -> None:
    with open_regular(live, links=False) as source, replacing(live) as target:
        source.seek(length)
        shutil.copyfileobj(source, target, _PORTION)


def repair(live: Path) -> None:
    """Undo a rotation that was broken off: drop a segment whose lines are still in the live file, and half files."""
    for pattern in (f".{LIVE}.*", ".events-*.jsonl.zst.*"):
        for left_behind in live.parent.glob(pattern):
            left_behind.unlink(missing_ok=True)
    with open_regular(live) as file:
        double = [_segment(path) for path in _paths(live)][len(_before(live, file)) :]
        for segment in double:
            file.seek(0)
            with closing(_open(segment)) as packed:
                same = all(part == file.read(len(part)) for part in _parts(packed, segment.size))
            if not same or len(double) > 1:
                raise RunError(f"{segment.path} and {live.name} hold other events of the same numbers; remove one")
    for segment in double:
        segment.path.unlink()
