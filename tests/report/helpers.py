"""Shared by the tests of reports: hostile names, lines of a log, results of a grid, a server of the page."""

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from freshet.report.live import WatchServer

Record = dict[str, Any]
EVIL = "<script>alert(1)</script>"


def lines(rows: Iterable[Record]) -> str:
    """Rows as a file of JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


@contextmanager
def serving(server: WatchServer) -> Iterator[WatchServer]:
    """The server of ``freshet watch``, answering in a thread of its own."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


# ---- results of a grid


def spread(median: float | None, count: int = 2) -> Record:
    return {"median": median, "low": median, "high": median, "count": count, "of": 2}


def line(label: str, kind: str = "async", accuracy: float = 0.8, time: float | None = 100.0, **more: Any) -> Record:
    found: Record = {"label": label, "kind": kind, "style": 3, "finished": 2, "all": 2, "diverged": [], "runs": [{}]}
    found |= {"accuracy": spread(accuracy), "time_raw": spread(time, 2 if time else 0), "published": None}
    found |= {key: spread(1e6) for key in ("bytes_up", "bytes_down", "bytes_fresh")}
    found["curve"] = {"time": [0.0, 10.0], "median": [0.1, accuracy], "low": [0.1, 0.5], "high": [0.1, 0.9]}
    return found | more


def world(name: str, lines: list[Record], cell: str = "lenet-fmnist") -> Record:
    shared = {"data": {"name": "digits"}}
    return {"name": name, "cell": cell, "target": 0.7, "until": 20.0, "shared": shared, "lines": lines}


def results(look: str, worlds: list[Record]) -> Record:
    return {"title": "an experiment", "look": look, "seeds": [0, 1], "notes": ["a note"], "worlds": worlds}
