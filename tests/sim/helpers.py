"""A crash in the middle of a run, and what two runs must have in common."""

import json
from pathlib import Path

from freshet import Observer


class CrashError(Exception):
    pass


class Crash(Observer):
    """Ends a run abruptly after ``after`` events; keeps the messages."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.messages: list[str] = []

    def on_event(self, event: dict) -> None:
        self.left -= 1
        if self.left == 0:
            raise CrashError

    def on_message(self, message: str) -> None:
        self.messages.append(message)


def outputs(directory: Path) -> tuple[bytes, str, list]:
    """The log, the hash of the final weights, and the metrics without real time."""
    summary = json.loads((directory / "summary.json").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row.pop("wall_seconds") >= 0
    return (directory / "events.jsonl").read_bytes(), summary["weights_sha256"], rows
