"""Make the figures on slots in docs/methods-appendix.md: does the selector learn in whole runs, and what can it learn?

The runs use the embedded digits: 100 devices, ratio 5, ``fleet.time = "trip"``, ten at a time, five epochs.

    python scripts/slots.py learned    merges per request, learned and random, and requests that find nothing
    python scripts/slots.py worth      the mean reward of each slot, with random slots
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from freshet import Federation
from freshet.config import resolve
from freshet.runs.reader import RunDirectory

RUN_SECONDS = {"fedssmu": 4700.0, "fedasmu": 1500.0}
CHOICE_SEEDS, OTHER_SEEDS, WORTH_SEEDS = (0, 1, 2), (4, 5, 6), (20, 21, 22)
WORLD = {"data": {"name": "digits"}, "fleet": {"devices": 100, "ratio": 5.0, "time": "trip"}}


class LoggedRequest(NamedTuple):
    """A request: its slot, and the reward of the merge that followed (None: no newer model)."""

    slot: int
    reward: float | None


@cache
def logged_requests(method: str, slot: str, seed: int) -> Sequence[LoggedRequest]:
    """Return all requests of a run, in order."""
    run = {"until": RUN_SECONDS[method], "seed": seed, "per_round": 10, "executor": "serial"}
    config = resolve(WORLD | {"method": {"name": method, "slot": slot}, "run": run})
    with tempfile.TemporaryDirectory() as folder:
        result = Federation.from_config(config).run(out=Path(folder) / "run")
        if result.summary["status"] == "interrupted":
            raise SystemExit("interrupted")
        events = list(RunDirectory(result.directory).events())
    rewards = {(event["device"], event["trip"]): event["reward"] for event in events if event["kind"] == "merge"}
    requests = [event for event in events if event["kind"] == "request"]
    return [LoggedRequest(event["slot"], rewards.get((event["device"], event["trip"]))) for event in requests]


def merge_rate(requests: Sequence[LoggedRequest]) -> float:
    """Return merges per request."""
    return fmean(request.reward is not None for request in requests)


def print_learned() -> None:
    """Compare learned with random slots, for the seeds used to choose the selector's settings and for others."""
    print("| | seeds | learned | random | empty, first -> last third |\n|---|---|---|---|---|")
    for method in RUN_SECONDS:
        for seeds in (CHOICE_SEEDS, OTHER_SEEDS):
            by_seed = [logged_requests(method, "rl", seed) for seed in seeds]
            ends = [
                (1 - merge_rate(runs[: len(runs) // 3]), 1 - merge_rate(runs[-(len(runs) // 3) :])) for runs in by_seed
            ]
            rates = [", ".join(f"{merge_rate(runs):.3f}" for runs in by_seed)]
            rates += [", ".join(f"{merge_rate(logged_requests(method, 'random', seed)):.3f}" for seed in seeds)]
            empty = " -> ".join(", ".join(f"{end[k]:.2f}" for end in ends) for k in (0, 1))
            names = ", ".join(map(str, seeds)) + (", used for the choice" if seeds == CHOICE_SEEDS else ", not used")
            print(f"| {method}, {RUN_SECONDS[method]:,.0f} s | {names} | {' | '.join(rates)} | {empty} |", flush=True)


def print_worth() -> None:
    """Print the mean reward by slot and its standard error. A request that finds nothing counts as 0."""
    print("| method | slot | merged | reward | merges with R > 0 |\n|---|---|---|---|---|")
    for method in ("fedasmu", "fedssmu"):
        by_slot: dict[int, list[float | None]] = defaultdict(list)
        for seed in WORTH_SEEDS:
            for slot, reward in logged_requests(method, "random", seed):
                by_slot[slot].append(reward)
        for slot, rewards in sorted(by_slot.items()):
            rewarded = [reward for reward in rewards if reward is not None]
            values = [reward or 0.0 for reward in rewards]
            error = stdev(values) / len(values) ** 0.5
            above = f"{fmean(reward > 0 for reward in rewarded):.0%}" if rewarded else ""
            found = f"{len(rewarded) / len(rewards):.0%} of {len(rewards)}"
            print(f"| {method} | {slot} | {found} | {fmean(values):.4f} +- {error:.4f} | {above} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learned", "worth"))
    {"learned": print_learned, "worth": print_worth}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
