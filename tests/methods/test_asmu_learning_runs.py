"""The learned slot in whole runs: FedASMU, 100 devices, ratio 5, m' = 10, five epochs, the embedded digits.

The seeds differ from those (0 to 3) on which the selector's settings were chosen. FedSSMU and the share of empty
requests are not tested, because learning is not shown there (docs/methods-appendix.md). Nor is the printed selector,
which learns nothing from a request that finds nothing newer.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from freshet.config import resolve
from freshet.federation import Federation
from freshet.runs.reader import RunDirectory

SECONDS = {"fedasmu": 1500.0}
SEEDS = (4, 5, 6)


class Requests(NamedTuple):
    """All requests of some runs, and those of their first and last thirds."""

    merges_per_request: float
    empty_first: float
    empty_last: float


def requests(method: str, slot: str, folder: Path) -> Requests:
    """Return the requests of three runs."""
    asked = merged = 0
    thirds: tuple[list[bool], list[bool]] = ([], [])
    for seed in SEEDS:
        run = {"seed": seed, "until": SECONDS[method], "executor": "serial", "eval_every": SECONDS[method]}
        fleet = {"devices": 100, "ratio": 5.0, "time": "trip"}
        config = resolve({"method": {"name": method, "slot": slot, "selector": "shaped"}, "fleet": fleet, "run": run})
        out = folder / f"{slot}-{seed}"
        summary = Federation.from_config(config).run(out=out).summary
        empty = [event["fresh"] is None for event in RunDirectory(out).events() if event["kind"] == "request"]
        asked, merged = asked + summary["requests"], merged + summary["merges"]
        thirds[0].extend(empty[: len(empty) // 3])
        thirds[1].extend(empty[-(len(empty) // 3) :])
    first, last = (sum(third) / len(third) for third in thirds)
    return Requests(merged / asked, first, last)


@pytest.mark.timeout(900)
def test_learned_slots_of_fedasmu_merge_at_least_as_often_as_random_ones(tmp_path: Path) -> None:
    learned, at_random = (requests("fedasmu", slot, tmp_path) for slot in ("rl", "random"))
    assert learned.merges_per_request >= at_random.merges_per_request
