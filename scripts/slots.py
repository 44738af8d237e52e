"""Make the figures on slots in docs/methods-appendix.md: do the selectors learn, and what can they learn in whole runs?

The runs use the embedded digits: 100 devices, ratio 5, ``fleet.time = "trip"``, ten at a time, five epochs.

    python scripts/slots.py scripted    how often each selector finds a known best slot in scripted worlds
    python scripts/slots.py selectors   whole runs with each selector: requests, merges, what the meta model learned
    python scripts/slots.py learned     shaped selector: merges per request, learned and random, and empty requests
    python scripts/slots.py worth       the mean reward of each slot, with random slots
"""

import argparse
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from freshet import Federation
from freshet.config import resolve
from freshet.core.messages import Assignment
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.methods import method_options
from freshet.methods.asmu import slots
from freshet.methods.asmu.meta import SELECTORS, MetaSelector
from freshet.methods.asmu.rule import FreshModelRule
from freshet.methods.fedasmu import FedASMU
from freshet.runs.reader import RunDirectory

RUN_SECONDS = {"fedssmu": 4700.0, "fedasmu": 1500.0}
CHOICE_SEEDS, OTHER_SEEDS, WORTH_SEEDS = (0, 1, 2), (4, 5, 6), (20, 21, 22)
SELECTOR_SEEDS = (7, 8)
WORLD = {"data": {"name": "digits"}, "fleet": {"devices": 100, "ratio": 5.0, "time": "trip"}}
#: What each row of the table of whole runs sets.
WHOLE_RUNS: dict[str, dict[str, Any]] = {
    "printed, shipped model": {"slot": "rl"},
    "printed, untrained": {"slot": "rl", "meta_from": "none"},
    "shaped": {"slot": "rl", "selector": "shaped"},
    "random": {"slot": "random"},
}
EPOCHS, SCRIPT_SEEDS, LATER_TRIPS, FIRST_TRIPS = 5, 10, 100, 200
LARGER_RATES = (1.0, 10.0, 100.0, 1000.0)
#: The reward of a slot where ``best`` is the best one. Real rewards are some thousandths too.
SCRIPTED: dict[str, Callable[[int, int], float]] = {
    "only the best slot pays": lambda slot, best: 0.003 * (slot == best),
    "every slot pays, the best one most": lambda slot, best: 0.003 * (1 - abs(slot - best) / EPOCHS),
    "every slot costs, the best one nothing": lambda slot, best: -0.003 * abs(slot - best),
}


class LoggedRequest(NamedTuple):
    """A request: its slot, and the reward of the merge that followed (None: no newer model)."""

    slot: int
    reward: float | None


class WholeRun(NamedTuple):
    """The requests of a run, in order, and the mean accuracy of its last five tests."""

    requests: Sequence[LoggedRequest]
    accuracy: float


def whole_run(method: str, seed: int, options: dict[str, Any]) -> WholeRun:
    """Run a method on the digits."""
    run = {"until": RUN_SECONDS[method], "seed": seed, "per_round": 10, "executor": "serial"}
    config = resolve(WORLD | {"method": {"name": method, **options}, "run": run})
    with tempfile.TemporaryDirectory() as folder:
        result = Federation.from_config(config).run(out=Path(folder) / "run")
        if result.summary["status"] == "interrupted":
            raise SystemExit("interrupted")
        events, tests = list(RunDirectory(result.directory).events()), RunDirectory(result.directory).metrics()
    rewards = {(event["device"], event["trip"]): event["reward"] for event in events if event["kind"] == "merge"}
    requests = [event for event in events if event["kind"] == "request"]
    logged = [LoggedRequest(event["slot"], rewards.get((event["device"], event["trip"]))) for event in requests]
    return WholeRun(logged, fmean(row["accuracy"] for row in tests[-5:]))


@cache
def logged_requests(method: str, slot: str, seed: int) -> Sequence[LoggedRequest]:
    """Return all requests of a run, in order. Learned slots are those of the shaped selector."""
    return whole_run(method, seed, {"slot": slot, "selector": "shaped"}).requests


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


class FirstAndLast:
    """Records the server's meta model of a run, and its distribution before its first lesson."""

    meta: MetaSelector | None = None
    first: slots.Table | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        instruct, recorder = FedASMU.instruct, self

        def record(self: FedASMU, server: Server, device: int) -> Any:
            if recorder.meta is None:
                recorder.meta, recorder.first = self.state.meta, self.state.meta.distribution()
            return instruct(self, server, device)

        FedASMU.instruct = record  # type: ignore[method-assign]
        try:
            yield
        finally:
            FedASMU.instruct = instruct  # type: ignore[method-assign]


def print_selectors() -> None:
    """Print requests, merges and the meta model's change, by selector. The change is the largest of a probability."""
    print("| | seed | first slot, first -> last | change of P | lessons | requests | merged | accuracy |")
    print("|---|---|---|---|---|---|---|---|")
    for method in ("fedasmu", "fedssmu"):
        for name, options in WHOLE_RUNS.items():
            for seed in SELECTOR_SEEDS:
                recorder = FirstAndLast()
                with recorder.recording():
                    run = whole_run(method, seed, options)
                learned = " | | "
                if options["slot"] == "rl" and recorder.meta is not None and recorder.first is not None:
                    last = recorder.meta.distribution()
                    moved = f"{np.abs(last - recorder.first).max():.1g}"
                    learned = (
                        f"{recorder.first.argmax() + 1} -> {last.argmax() + 1} | {moved} | {recorder.meta.lessons}"
                    )
                found = f"{len(run.requests)} | {merge_rate(run.requests):.3f} | {run.accuracy:.3f}"
                print(f"| {method}, {name} | {seed} | {learned} | {found} |", flush=True)


def table_finds(selector: slots.Selector, reward: Callable[[int], float], best: int, seed: int) -> bool:
    """Give a device's Q-table 100 trips from slot 3. Is the best slot the most frequent one of the last 20?"""
    rule = FreshModelRule(method_options("fedasmu", {"selector": selector}))
    memory: dict[str, Any] = {}
    asked = []
    for trip in range(1, LATER_TRIPS + 1):
        sent = Assignment(0, trip, 1, 1, np.zeros(1, np.float32), EPOCHS, 0.1, {"meta_slot": 3})
        slot = rule.plan(memory, sent, stream(seed, "slot", 0, trip))  # as in a run
        assert slot is not None
        asked.append(slot.epoch)
        merges = [SimpleNamespace(numbers={"reward": reward(slot.epoch)})]
        rule.finish(SimpleNamespace(assignment=sent, slot=slot, memory=memory, merges=merges, report={}))
    return Counter(asked[-20:]).most_common(1)[0][0] == best


def meta_model_finds(
    selector: slots.Selector, reward: Callable[[int], float], best: int, seed: int, eta_rl: float = 1e-3
) -> tuple[bool, float]:
    """Give an untrained meta model 200 first trips. Does it prefer the best slot, and how far did P move?"""
    options = method_options("fedasmu", {"selector": selector, "eta_rl": eta_rl})
    meta = SELECTORS[selector](EPOCHS, options.eta_rl, options.rho, seed, options.epsilon)
    first = meta.distribution()
    for device in range(FIRST_TRIPS):
        slot = slots.first_slot(meta.best_slot(), EPOCHS, options.epsilon, stream(seed, "slot", device, 1)).epoch
        meta.add_reward(reward(slot))
        meta.reinforce(slot, reward(slot))
    return meta.best_slot() == best, float(np.abs(meta.distribution() - first).max())


def cases(world: str) -> Iterator[tuple[Callable[[int], float], int, int]]:
    """Yield the reward by slot, the best slot and a seed."""
    for best in range(1, EPOCHS + 1):
        for seed in range(SCRIPT_SEEDS):
            yield reward_by_slot(world, best), best, seed


def reward_by_slot(world: str, best: int) -> Callable[[int], float]:
    """Return the reward of each slot in a world with this best slot."""
    return lambda slot: SCRIPTED[world](slot, best)


def print_scripted() -> None:
    """Print how often the selectors find the best slot, over ten seeds and five best slots per world."""
    print("| world | selector | Q-table | meta model | change of P, median |\n|---|---|---|---|---|")
    for world in SCRIPTED:
        for selector in SELECTORS:
            tables = [table_finds(selector, *case) for case in cases(world)]
            metas = [meta_model_finds(selector, *case) for case in cases(world)]
            moved = float(np.median([change for _, change in metas]))
            found = f"{sum(tables)} of {len(tables)} | {sum(each for each, _ in metas)} of {len(metas)}"
            print(f"| {world} | {selector} | {found} | {moved:.1g} |", flush=True)
    for rate in LARGER_RATES:
        metas = [meta_model_finds("printed", *case, rate) for world in SCRIPTED for case in cases(world)]
        print(f"\nprinted meta model, eta_rl = {rate:g}: {sum(each for each, _ in metas)} of {len(metas)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prints = {
        "scripted": print_scripted,
        "selectors": print_selectors,
        "learned": print_learned,
        "worth": print_worth,
    }
    parser.add_argument("what", choices=tuple(prints))
    prints[parser.parse_args().what]()


if __name__ == "__main__":
    main()
