"""Reading a run directory. Nothing in it is trusted: it is parsed as TOML and JSON and never evaluated, code that it
names is not imported, and no file in it is read without a bound."""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from freshet.errors import RunError
from freshet.files import read_regular, reason
from freshet.runs.records import parsed
from freshet.runs.segments import LIVE, LONGEST_LINE, lines

#: How a run may have come to its end, with all that it was to do done: a grid does not run it again.
ENDED = ("finished", "diverged", "stopped")


def same_class(name: str, named: str) -> bool:
    """Whether two names of own code may mean the same: the place may have changed since, the class has not."""
    return ":" in name and name.rpartition(":")[2] == named.rpartition(":")[2]


class RunDirectory:
    """A run directory, old or new, simulated or real."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise RunError(f"{directory} is not a run directory: there is no such folder")
        if not (self.directory / "config.toml").is_file():
            raise RunError(f"{directory} is not a run directory: it has no config.toml")

    def config(self) -> dict[str, Any]:
        """The tables of config.toml."""
        path = self.directory / "config.toml"
        tables = self._parsed(path, lambda content: tomllib.loads(content.decode()))
        for section, table in tables.items():
            if not isinstance(table, dict):
                raise RunError(f"{path} cannot be used: {section[:40]} is not a table of settings")
        return tables

    def method(self) -> str:
        """The name of the method, which may be of code that is not ours: ``module:Class``."""
        name = self.config().get("method", {}).get("name")
        if not isinstance(name, str):
            raise RunError(f"{self.directory}/config.toml does not name a method")
        return name

    def trusted(self, method: str | None) -> dict[str, Any]:
        """The tables of config.toml for use, the method being a built-in one or the one that the user has named.

        What config.toml alone names is never imported: it may come from anybody.
        """
        from freshet.methods import find, known

        tables, name = self.config(), self.method()
        if known(name) is None:
            if method is None and name.startswith("custom:"):
                find(name)  # says who can go on with it
            if method is None:
                raise RunError(
                    f"{self.directory} names {name}, which is not built in, and is not imported on its word; "
                    f"if you trust it, name it yourself: --method {name}"
                )
            if not same_class(name, method):
                raise RunError(f"{self.directory} was made with another configuration: its method is {name}")
            tables["method"]["name"] = method
        return tables

    def _parsed(self, path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
        """A file of a run directory as a dict; one sentence for whatever is wrong with it."""
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

    def summary(self) -> dict[str, Any]:
        """summary.json; a run that is still going, or that was killed, has none."""
        path = self.directory / "summary.json"
        if not path.is_file():
            raise RunError(f"{self.directory} has no summary.json: the run is still going, or was killed")
        return self._parsed(path, json.loads)

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

    def events(self, seen: Callable[[int], None] = lambda count: None) -> Iterator[dict[str, Any]]:
        """The lines of the log, compressed parts first, in order; ``seen`` is told the bytes of each."""
        return self._lines(LIVE, seen)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return list(self._lines("metrics.jsonl"))

    def _lines(self, name: str, seen: Callable[[int], None] = lambda count: None) -> Iterator[dict[str, Any]]:
        path = self.directory / name
        if not path.is_file():
            raise RunError(f"{self.directory} has no {name}")
        try:
            for number, line in enumerate(lines(path), 1):
                value = parsed(line) if len(line) < LONGEST_LINE else None
                if value is None:
                    raise RunError(f"{path}, line {number}: is not a JSON object")
                seen(len(line))
                yield value
        except OSError as error:
            raise RunError(f"{path} cannot be read ({reason(error)})") from None
