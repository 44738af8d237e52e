"""Check a submission to the benchmark: a folder of run directories with their logs.

For each run: its settings are those of a world; its log passes the audit; the tests in its metrics are those of its
log; and a repetition gives the same log. A trip cannot be repeated alone, because a run directory does not hold the
models that trips start from. So the run is repeated from its start to the arrival of a trip that is drawn at random
among the first ones, and every event until then is compared.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from freshet.config import resolve, with_added_settings
from freshet.errors import FreshetError, Stop
from freshet.experiments.bench import VERSION, find_world
from freshet.federation import Federation
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import Observer

#: The trip is drawn among this many first arrivals.
FIRST_ARRIVALS = 40
#: On another machine the last bits of a weight differ. Numbers that are closer than this, relative to 1 or to the
#: number, agree; whole numbers and words must be equal.
TOLERANCE = 0.02
#: Keys of a test in the log that its row in the metrics repeats.
TESTED = ("accuracy", "loss")


@dataclass(frozen=True)
class Checked:
    """What was found out about one run; ``problem`` is the first thing that is wrong."""

    run: Path
    world: str = ""
    budget: str = ""
    method: str = ""
    #: What was done, a sentence each.
    done: list[str] = field(default_factory=list)
    problem: str | None = None


class _Until(Observer):
    """Ends a run after a time."""

    def __init__(self, time: float) -> None:
        self._time = time

    def on_progress(self, time: float) -> None:
        if time > self._time:
            raise Stop("the trip has arrived")


def check_run(directory: Path, method: str | None, seed: int) -> Checked:
    """Check one run. A method that is not built in is imported only if the user names it."""
    found = Checked(directory)
    try:
        run = RunDirectory(directory)
        belongs = find_world(run.config())
        if belongs is None:
            return _wrong(found, f"its settings are not those of a world of {VERSION}")
        world, budget = belongs
        found = Checked(directory, world.name, budget, run.method())
        if not run.finished():
            return _wrong(found, "it has not ended")
        result = audit(run, method)
        if result.problem is not None:
            return _wrong(found, result.problem)
        weights = "weights recomputed" if result.audited else f"weights not recomputed: {result.unaudited}"
        found.done.append(f"{result.events} events audited, {weights}")
        problem = compare_tests(run.metrics(), run.events())
        return _wrong(found, problem) if problem else repeat(found, run, method, seed)
    except FreshetError as error:
        return _wrong(found, str(error))


def _wrong(found: Checked, problem: str) -> Checked:
    return Checked(found.run, found.world, found.budget, found.method, found.done, problem)


def compare_tests(rows: Sequence[Mapping[str, Any]], events: Iterator[Mapping[str, Any]]) -> str | None:
    """What differs between the metrics and the tests in the log, or None."""
    logged = {event["time"]: event for event in events if event.get("kind") == "evaluate"}
    for row in rows:
        test = logged.get(row.get("time"))
        if test is None:
            return f"metrics.jsonl has a test at {row.get('time')} s that the log lacks"
        for key in TESTED:
            if row.get(key) != test.get(key):
                return f"{key} at {row['time']} s is {row.get(key)} in metrics.jsonl and {test.get(key)} in the log"
    return None


def repeat(found: Checked, run: RunDirectory, method: str | None, seed: int) -> Checked:
    """Repeat the run to the arrival of a random trip and compare every event."""
    arrivals = []
    for event in run.events():
        if event.get("kind") == "upload":
            arrivals.append(event)
        if len(arrivals) == FIRST_ARRIVALS:
            break
    if not arrivals:
        return _wrong(found, "no upload arrived in it, so nothing can be repeated")
    chosen = random.Random(seed).choice(arrivals)  # noqa: S311  # nothing secret depends on it
    tables = with_added_settings(run.trusted_config(method))
    tables["data"] = {key: value for key, value in tables["data"].items() if key != "dir"}
    tables["run"] = tables["run"] | {"executor": "serial", "checkpoint_minutes": 0.0, "rotate_log": 0.0}
    with TemporaryDirectory() as folder:
        again = Path(folder) / "run"
        Federation.from_config(resolve(tables)).run(out=again, observers=[_Until(float(chosen["time"]))])
        exact, problem = compare_events(run.events(), RunDirectory(again).events(), int(chosen["seq"]))
    if problem:
        return _wrong(found, problem)
    what = f"repeated from its start to the arrival of trip {chosen['trip']} of device {chosen['device']}"
    found.done.append(f"{what} at {chosen['time']:g} s: {'the same bits' if exact else 'equal but for rounding'}")
    return found


def compare_events(
    theirs: Iterator[Mapping[str, Any]], ours: Iterator[Mapping[str, Any]], count: int
) -> tuple[bool, str | None]:
    """Compare the first events of two logs: whether they are equal to the bit, and the first other difference."""
    exact = True
    nothing: Mapping[str, Any] = {}
    pairs = zip_longest(islice(theirs, count), islice(ours, count), fillvalue=nothing)
    for number, (line, again) in enumerate(pairs, 1):
        if line == again:
            continue
        exact = False
        difference = first_difference(line, again)
        if difference is not None:
            return False, f"events.jsonl, line {number} ({line.get('kind')}): {difference}"
    return exact, None


def first_difference(one: Any, other: Any, name: str = "") -> str | None:
    """The first value in which two records differ by more than rounding, in words."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [*one, *(key for key in other if key not in one)]
        pairs = [(one.get(key), other.get(key), f"{name}.{key}" if name else str(key)) for key in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(a, b, f"{name}[{place}]") for place, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return None if _agree(one, other) else f"{name} is {_short(one)}, and {_short(other)} when repeated"
    return next((found for a, b, at in pairs if (found := first_difference(a, b, at)) is not None), None)


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE * max(1.0, abs(one))
    return bool(one == other)


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
