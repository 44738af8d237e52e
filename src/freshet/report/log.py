"""A run's events, gone through line by line: a log may be far larger than memory, so no more than a line is held.

What every report asks for (how far the log reaches, how many devices it names, how many events of a kind) is counted
once, as the file is taken in. All else goes through the file again.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from freshet.runs.records import contributors, number, parse_line, integer
from freshet.runs.segments import DamagedSegment, lines, size

Record = dict[str, Any]
#: Called with the bytes that were just read, for a bar.
Seen = Callable[[int], None]
#: A file whose times go back (somebody edited it) is sorted in memory if it is no larger than this.
SORTED_BYTES = 1 << 25
#: A bar is told of the lines that were gone through after so many bytes.
PORTION = 1 << 18


class Log:
    """The events of a run, as often as they are wanted. Without a path there are none."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._seen: Seen = lambda count: None
        self._clear()

    def _clear(self) -> None:
        self.note: str | None = None
        self.kinds: Counter[str] = Counter()
        #: Seconds to which it reaches, and one more than the largest device that it names.
        self.end, self.devices = 0.0, 0
        #: Tests of the model, each with its numbers.
        self.tests: list[Record] = []
        #: How many uploads entered an aggregation at which staleness.
        self.stalenesses: Counter[int] = Counter()
        self._offset, self._line, self._ordered = 0, 0, True

    def __len__(self) -> int:
        return self.kinds.total()

    @property
    def unread(self) -> int:
        """Bytes that have been added since they were last taken in."""
        try:
            return 0 if self.path is None else size(self.path) - self._offset
        except OSError:
            return 0
        except DamagedSegment:
            return 1  # to be said when it is read

    def read(self, seen: Seen = lambda count: None) -> bool:
        """Take in what has been added and is complete; True when there was something. A file that was cut back is read
        again from its start. ``seen`` is told the bytes of each line, now and whenever the file is gone through."""
        self._seen = seen
        if self.unread < 0:
            self._clear()
        if self.path is None or self.unread == 0 or self.note is not None:
            return False
        before = self._offset
        try:
            self._take(self.path, seen)
        except DamagedSegment as problem:
            self.note = f"{problem}; what follows is not shown"
        return self._offset > before or self.note is not None

    def _take(self, path: Path, seen: Seen) -> None:
        for line in lines(path, self._offset):
            if not line.endswith(b"\n"):
                return
            self._line += 1
            row = parse_line(line)
            if row is None:
                self.note = f"{path.name} is damaged at line {self._line}; what follows is not shown"
                return
            self._offset += len(line)
            self._count(row)
            seen(len(line))

    def _count(self, row: Record) -> None:
        time, device = number(row.get("time")), integer(row.get("device"))
        if time is None:
            return
        self._ordered &= time >= self.end
        self.end = max(self.end, time)
        self.kinds[str(row.get("kind"))] += 1
        self.devices = max(self.devices, -1 if device is None else device + 1)
        kind = row.get("kind")
        if kind == "aggregate":
            self.stalenesses.update(each.staleness for each in contributors(row) if each.staleness is not None)
        elif kind == "evaluate":
            self.tests.append(row)

    def __iter__(self) -> Iterator[Record]:
        return self.of()

    def of(self, *kinds: str) -> Iterator[Record]:
        """The events of these kinds (default: of all) that have a time, in order."""
        found = self._of(*kinds) if self.note is None else self._until_damage(*kinds)
        if not self._ordered and self._offset <= SORTED_BYTES:
            return iter(sorted(found, key=lambda row: float(row["time"])))
        return found

    def _until_damage(self, *kinds: str) -> Iterator[Record]:
        """The same of a log that is damaged, as the note says."""
        with suppress(DamagedSegment):
            yield from self._of(*kinds)

    def _of(self, *kinds: str) -> Iterator[Record]:
        if self.path is None or not self._offset or (kinds and self.kinds.keys().isdisjoint(kinds)):
            return
        names = re.compile("|".join(f'"{re.escape(kind)}"' for kind in kinds).encode())
        left, told = self._offset, self._offset
        for line in lines(self.path):
            left -= len(line)
            if told - left >= PORTION or left <= 0:
                self._seen(told - left)
                told = left
            if names.search(line):
                row = parse_line(line)
                if row is not None and number(row.get("time")) is not None and (not kinds or row.get("kind") in kinds):
                    yield row
            if left <= 0:
                return
