"""What a server says about itself: a file that it replaces every few seconds, and what ``deploy status`` prints."""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freshet.files import read_regular, write_atomically

#: Seconds between two writes of the file, and seconds after which a server that has not written is said to be silent.
WRITE_SECONDS, SILENT_SECONDS = 2.0, 60.0
STATUS_FILE = "status.json"


@dataclass
class DeviceState:
    """What the server knows about a device. Times are those of the server's clock; None if it never happened."""

    device: int
    node: int | None = None
    #: never (seen), online, training or offline, and since when.
    state: str = "never"
    since: float | None = None
    last_upload: float | None = None
    trips: int = 0
    lost: int = 0
    last_loss: str = ""
    #: Freshet's version on the device, as it reports it.
    software: str = ""

    def record_upload(self, seconds_ago: float) -> None:
        """An upload has come: now, or before a restart of the server."""
        self.last_upload = time.time() - seconds_ago

    def enter(self, state: str) -> None:
        """Change the state, unless it is the same."""
        if state != self.state:
            self.state, self.since = state, time.time()


def write(path: Path, facts: Mapping[str, Any], devices: list[DeviceState]) -> None:
    """Replace the status file."""
    status = {"pid": os.getpid(), "written": time.time(), **facts, "devices": [asdict(each) for each in devices]}
    write_atomically(path, json.dumps(status).encode())


def read(path: Path) -> dict[str, Any] | None:
    """The status file with ``running``: whether its process lives. None if there is no usable file."""
    try:
        status = json.loads(read_regular(path))
        alive = is_alive(int(status["pid"]))
        return dict(status) | {"running": alive and not status.get("ended", False)}
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def lines(status: Mapping[str, Any], now: float) -> list[str]:
    """The server, its run and every device, one line each."""
    found = [_server_line(status, now), progress_line(status)]
    rows = [("device", "state", "since", "last upload", "trips", "lost", "software")]
    for each in status["devices"]:
        times = (_ago(each[name], now) for name in ("since", "last_upload"))
        counts = (str(each["trips"]), str(each["lost"]), each["software"] or "–")
        rows.append((str(each["device"]), each["state"], *times, *counts))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    found += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return found


def progress_line(status: Mapping[str, Any]) -> str:
    """How far the run is: time, uploads, score, devices, time left."""
    if status.get("waiting_for"):
        return f"run: waiting for {status['waiting_for']} devices; {online_count(status)} online"
    seconds, until, score = status["seconds"], status.get("until"), status.get("score")
    parts = [f"run: {duration(seconds)}" + (f" of {duration(until)}" if until else "")]
    parts += [f"version {status['version']}", f"{status['uploads']} uploads"]
    parts += [f"{score[0]} {score[1]:.3f}"] if score else []
    parts += [f"{online_count(status)} devices online"]
    parts += [f"{duration(until - seconds)} left"] if until and status["running"] else []
    return ", ".join(parts)


def online_count(status: Mapping[str, Any]) -> int:
    return sum(each["state"] in ("online", "training") for each in status["devices"])


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    whole = max(0, math.floor(seconds))
    for unit, (size, smaller, name) in {"d": (86400, 3600, "h"), "h": (3600, 60, "min")}.items():
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole // 60} min" if whole >= 120 else f"{whole} s"


def _server_line(status: Mapping[str, Any], now: float) -> str:
    silent = now - status["written"]
    if not status["running"]:
        return f"server: not running since {duration(silent)} ago" + (
            " (the run has ended)" * bool(status.get("ended"))
        )
    if silent > SILENT_SECONDS:
        return f"server: process {status['pid']} lives, but has said nothing for {duration(silent)}"
    return f"server: process {status['pid']}, running"


def _ago(at: float | None, now: float) -> str:
    return "–" if at is None else f"{duration(now - at)} ago"
