"""Reading a run directory. Nothing in it is trusted: it is parsed as TOML and JSON and never evaluated."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freshet.errors import RunError

#: How a run may have come to its end, with all that it was to do done: a grid does not run it again.
ENDED = ("finished", "diverged", "stopped")


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

    def finished(self) -> bool:
        """Whether the run came to its end, be it that it diverged or was stopped."""
        return (self.directory / "summary.json").is_file() and self.summary().get("status") in ENDED

    def check_resumable(self, longer: bool = False) -> None:
        """Raise if the run has come to its end. One that was stopped may go on; a finished one, if it gets a later end.

        A model that has diverged is beyond help."""
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
