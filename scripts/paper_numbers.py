"""What the numbers of the FedASMU paper's main table imply about its world; docs/paper-numbers.md explains the steps.

python scripts/paper_numbers.py                the arithmetic
python scripts/paper_numbers.py --simulate     devices in flight, measured in runs of a small network (some minutes)
"""

import argparse
import tempfile
from itertools import groupby
from pathlib import Path

from freshet import Federation
from freshet.config import resolve
from freshet.experiments.grid import model_bytes
from freshet.paper.cells import CELLS, METHODS, cell_tables
from freshet.runs.reader import RunDirectory

ROUNDS = CELLS["lenet-cifar10"].rounds
SYNCHRONOUS, ASYNCHRONOUS = METHODS[6:], METHODS[:6]
#: Cell, method and time.
Entry = tuple[str, str, float]


def published(methods: tuple[str, ...]) -> list[Entry]:
    """The published times of these methods, shortest first."""
    found = [
        (name, method, time)
        for name, cell in CELLS.items()
        for method in methods
        if (time := cell.published[method].time) is not None
    ]
    return sorted(found, key=lambda entry: entry[2])


def equal_times() -> dict[float, list[Entry]]:
    """Times that cells with different networks share to the second."""
    groups = {time: list(group) for time, group in groupby(published(METHODS), key=lambda entry: entry[2])}
    return {time: group for time, group in groups.items() if len({CELLS[name].model for name, *_ in group}) > 1}


def transfer_seconds(cell: str, up_mbps: float = 10.0, down_mbps: float = 50.0) -> float:
    """Seconds to send a cell's network down and up."""
    megabits = 8e-6 * model_bytes(resolve(cell_tables(CELLS[cell], "fedavg")))
    return megabits / up_mbps + megabits / down_mbps


def slowest_of(devices: int, ratio: float) -> float:
    """The expected largest of this many draws from U(1, ratio)."""
    return 1.0 + (ratio - 1.0) * devices / (devices + 1)


def least_round() -> tuple[Entry, float]:
    """The longest published synchronous time, and the seconds of a round with which it lies within the rounds."""
    longest = published(SYNCHRONOUS)[-1]
    return longest, longest[2] / ROUNDS


def beyond_the_end(fastest: float) -> tuple[int, int]:
    """How many of the published synchronous times lie after the last round, and how many there are."""
    times = [time for *_, time in published(SYNCHRONOUS)]
    end = ROUNDS * fastest * slowest_of(10, 5.0)
    return sum(time > end for time in times), len(times)


def speedups() -> dict[str, float]:
    """FedAvg's time divided by FedASMU's, where both reach the target."""
    times = {name: (cell.published["fedavg"].time, cell.published["fedasmu"].time) for name, cell in CELLS.items()}
    return {name: avg / asmu for name, (avg, asmu) in times.items() if avg is not None and asmu is not None}


def simulate(threshold: int, rounds: int = 100) -> dict[str, float]:
    """Devices in flight, staleness and discards of ``fedasmu-0`` in the cells' fleet; a small network trains."""
    tables = cell_tables(CELLS["lenet-cifar10"], "fedasmu-0")
    end = rounds * tables["run"]["eval_every"]
    tables["data"] = {"name": "digits", "train_samples": 500, "min_samples": 1}
    tables["model"], tables["training"]["epochs"] = {"name": "mlp", "hidden": [2]}, 1
    tables["run"] |= {"in_flight": threshold, "until": end, "eval_every": end, "executor": "serial"}
    with tempfile.TemporaryDirectory() as folder:
        result = Federation.from_config(resolve(tables)).run(out=Path(folder) / "run")
        flying = area = before = 0.0
        heard: set[int] = set()
        for event in RunDirectory(result.directory).events():
            area += flying * (event["time"] - before)
            flying += (event["kind"] == "trigger") - (event["kind"] == "upload")
            heard |= {part["device"] for part in event["contributions"]} if event["kind"] == "aggregate" else set()
            before = event["time"]
        summary = result.summary
    return {
        "in flight": area / before,
        "staleness": summary["mean_staleness"],
        "discarded": summary["discards"] / summary["uploads"],
        "never heard": 1.0 - len(heard) / tables["fleet"]["devices"],
        "uploads over FedAvg's": summary["uploads"] / (rounds * tables["run"]["per_round"]),
    }


def show() -> None:
    """Print the arithmetic."""
    for time, group in equal_times().items():
        print(f"{time:,.0f} s: {', '.join(f'{name} {method}' for name, method, _ in group)}")
    lenet, alexnet = transfer_seconds("lenet-cifar10"), transfer_seconds("alexnet-cifar10")
    print(f"a transfer down and up at 50 and 10 Mbit/s: LeNet {lenet:.2f} s, AlexNet {alexnet:.2f} s")
    (cell, method, time), seconds = least_round()
    factor = slowest_of(10, 5.0)
    print(f"longest synchronous time: {time:,.0f} s ({method}, {cell}), so a round lasts at least {seconds:.0f} s")
    print(f"the slowest of ten draws from U(f, 5f): {factor:.3f} f, so f is at least {seconds / factor:.0f} s")
    for fastest in (10.0, 190.0):
        beyond, count = beyond_the_end(fastest)
        print(f"f = {fastest:g} s: {beyond} of {count} synchronous times lie after round {ROUNDS}")
    cell, method, time = published(ASYNCHRONOUS)[-1]
    mine = CELLS["vgg-cifar100"].published["fedasmu"].time or 0.0
    each = f"FedASMU {mine / ROUNDS:.0f} s, {method} {time / ROUNDS:.0f} s"
    print(f"if T counted uploads, seconds of each: {each}; FedAvg {seconds / 10:.0f} s")
    found = speedups()
    print("FedAvg's time over FedASMU's: " + ", ".join(f"{name} {ratio:.1f}" for name, ratio in found.items()))
    print(f"above {factor:.2f}: {sum(ratio > factor for ratio in found.values())} of {len(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="measure devices in flight and staleness")
    if parser.parse_args().simulate:
        for threshold in (10, 20, 30, 60, 100):
            found = simulate(threshold)
            print(f"threshold {threshold}: " + ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
        return
    show()


if __name__ == "__main__":
    main()
