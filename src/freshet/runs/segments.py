"""The log of a run: one sequence of lines in one or more files. Only this module knows which files.

    events-000001.jsonl.zst, events-000002.jsonl.zst, ..., events.jsonl

Positions count uncompressed bytes from the start of the whole log, so rotation does not change them. Rotation takes two
atomic steps: the segment appears while the live file still holds its lines, then the live file is replaced by its rest.
A reader in between skips the segment; a resumed run removes it.

Segments may come from anybody. They are decompressed as a stream, in little memory, up to the size that they announce.
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

#: The live file, which the run appends to.
LIVE = "events.jsonl"
#: Bytes of the longest line of a log. An aggregation of a million devices fits.
LONGEST_LINE = 1 << 28
#: Reject segments that expand to more than ``UNCHECKED_BYTES`` and more than ``MAX_RATIO`` times their file.
UNCHECKED_BYTES, MAX_RATIO = 1 << 26, 1000
#: Reject lines longer than ``UNCHECKED_LINE_BYTES`` and longer than ``MAX_LINE_RATIO`` times the file of their segment.
#: A parsed line takes a dozen times as much memory.
UNCHECKED_LINE_BYTES, MAX_LINE_RATIO = 1 << 22, 20
#: Bytes of memory that decompressing a segment may need. Segments that Freshet writes need a quarter of it.
_WINDOW = 1 << 23
_LEVEL, _PORTION = 3, 1 << 17
_NAME = re.compile(r"events-([0-9]{6,12})\.jsonl\.zst")
_FIRST = re.compile(rb'\{"seq": ?([0-9]{1,15})[,}]')
_MISSING = "needs zstandard, which is not installed; install it: pip install 'freshet-fl[zst]'"


class DamagedSegment(RunError):
    """A segment cannot be read to its end, or is missing."""


class Segment(NamedTuple):
    """A compressed part of a log: its uncompressed bytes and the number of its first event."""

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
    """The lines of the whole log from byte ``start`` on. Only the last one may be incomplete."""
    with open_regular(live) as file:  # before the segments: lines that are rotated from now on are still in this file
        for segment in _before(live, file):
            if start < segment.size:
                yield from _lines(segment, start)
            start = max(0, start - segment.size)
        file.seek(start)
        yield from _each_line(file)


def size(live: Path) -> int:
    """Uncompressed bytes of the whole log."""
    with open_regular(live) as file:
        return sum(segment.size for segment in _before(live, file)) + file.seek(0, io.SEEK_END)


def live_start(live: Path) -> int:
    """Position in the whole log at which the live file begins."""
    with open_regular(live) as file:
        return sum(segment.size for segment in _before(live, file))


def check_position(live: Path, position: int, seq: int) -> None:
    """Raise ValueError unless the live file contains this position, right after event number ``seq``."""
    with open_regular(live) as file:
        before = _before(live, file)
        start, first = position - sum(segment.size for segment in before), _first(file)
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
            raise DamagedSegment(f"{_path(live, expected)} is missing, but later parts of the log exist; put it back")
    return [_path(live, number) for number in numbers]


def _path(live: Path, number: int) -> Path:
    return live.with_name(f"events-{number:06d}.jsonl.zst")


def _before(live: Path, file: BinaryIO) -> list[Segment]:
    """The segments with lines before those in the live file."""
    segments, first = [_segment(path) for path in _paths(live)], _first(file)
    while segments and first is not None and segments[-1].first >= first:
        segments.pop()
    return segments


def _first(file: BinaryIO) -> int | None:
    """The number of the first event in a file, or None."""
    file.seek(0)
    match = _FIRST.match(file.read(64))
    return int(match[1]) if match else None


def _segment(path: Path) -> Segment:
    try:
        status = path.stat()
        return _inspect(path, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise DamagedSegment(f"{path} cannot be read ({reason(error)})") from None


@lru_cache(10_000)
def _inspect(path: Path, inode: int, packed: int, changed: int) -> Segment:
    """Read the start of a segment. The result is cached, since a segment never changes."""
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
    if length > max(UNCHECKED_BYTES, MAX_RATIO * packed):
        raise DamagedSegment(f"{path} would expand to more than {MAX_RATIO:,} times its size; it is refused")


class _Decompressed(io.RawIOBase):
    """The uncompressed bytes of a segment as a stream. Any problem is a ``DamagedSegment``."""

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
    return io.BufferedReader(_Decompressed(segment), _PORTION)


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
    """Bytes of the longest line accepted in a segment with a file of ``packed`` bytes."""
    return min(LONGEST_LINE, max(UNCHECKED_LINE_BYTES, MAX_LINE_RATIO * packed))


def _each_line(file: BinaryIO, longest: int | None = None) -> Iterator[bytes]:
    """The lines of a file, read in blocks. A line longer than ``longest`` comes in pieces."""
    most = LONGEST_LINE if longest is None else longest
    while block := file.read(_PORTION):
        if not block.endswith(b"\n"):
            block += file.readline(max(0, most - len(block)))
        yield from io.BytesIO(block)


def _parts(file: BinaryIO, length: int) -> Iterator[bytes]:
    """The next ``length`` bytes of a file, in parts."""
    while length and (part := file.read(min(length, _PORTION))):
        length -= len(part)
        yield part


# ---- writing


def rotate(live: Path, length: int) -> bool:
    """Move the first ``length`` bytes of the live file (whole lines) to the next segment.

    Return False if they stay in place: readers would reject a segment that compresses too well.
    """
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
            raise DamagedSegment(f"{path} would hold a line that readers reject")


def _drop_start(live: Path, length: int) -> None:
    with open_regular(live, links=False) as source, replacing(live) as target:
        source.seek(length)
        shutil.copyfileobj(source, target, _PORTION)


def repair(live: Path) -> None:
    """Undo an interrupted rotation: remove temporary files, and a segment if its lines are still in the live file."""
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
                raise RunError(
                    f"{segment.path} and {live.name} hold different events with the same numbers; remove one"
                )
    for segment in double:
        segment.path.unlink()
