"""Reading a run directory. Nothing in it is trusted: it is parsed as TOML and JSON and never evaluated."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freshet.core.about import Curve
from freshet.errors import RunError

#: How a run may have come to its end: with nothing left to do, and nothing to resume.
ENDED = ("finished", "diverged")


class Run:
    """A run directory, old or new, simulated or real."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise RunError(f"{directory} is not a run directory: there is no such folder")
        if not (self.directory / "config.toml").is_file():
            raise RunError(f"{directory} is not a run directory: it has no config.toml")

    def config(self) -> dict[str, Any]:
        """The tables of config.toml."""
        try:
            return tomllib.loads((self.directory / "config.toml").read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{self.directory}/config.toml cannot be read ({error})") from None

    def summary(self) -> dict[str, Any]:
        """summary.json; a run that is still going, or that was killed, has none."""
        path = self.directory / "summary.json"
        if not path.is_file():
            raise RunError(f"{self.directory} has no summary.json: the run is still going, or was killed")
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunError(f"{path} cannot be read ({error})") from None
        if not isinstance(summary, dict):
            raise RunError(f"{path} does not hold a JSON object")
        return summary

    def curves(self) -> tuple[Curve, ...] | None:
        """curves.json: the numbers of the events that the method wants drawn; None where an older run does not say."""
        path = self.directory / "curves.json"
        if not path.is_file():
            return None
        try:
            found = tuple(Curve(**each) for each in json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{path} cannot be read ({error})") from None
        if not all(isinstance(part, str) for each in found for part in each):
            raise RunError(f"{path} holds a curve that is not described in words")
        return found

    def finished(self) -> bool:
        """Whether the run came to its end, be it that it diverged."""
        return (self.directory / "summary.json").is_file() and self.summary().get("status") in ENDED

    def check_resumable(self) -> None:
        """Raise if the run has come to its end."""
        if not self.finished():
            return
        summary = self.summary()
        if summary["status"] == "diverged":
            raise RunError(
                f"{self.directory} diverged at {summary.get('diverged')} s and cannot be resumed; run it again with a "
                'smaller training.lr, or with run.diverged = "continue"'
            )
        raise RunError(f"{self.directory} is already finished")

    def events(self) -> Iterator[dict[str, Any]]:
        """The lines of events.jsonl, in order."""
        return self._lines("events.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return list(self._lines("metrics.jsonl"))

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.directory / name
        if not path.is_file():
            raise RunError(f"{self.directory} has no {name}")
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    raise RunError(f"{path}, line {number}: is not a JSON object") from None
                if not isinstance(value, dict):
                    raise RunError(f"{path}, line {number}: is not a JSON object")
                yield value
