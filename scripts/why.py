"""Show what the parts of FedASMU do in a run: ``python scripts/why.py CONFIG.toml [--until 1500]``.

The script runs the configuration and prints, for each fifth of the run: the weights alpha and beta, the controls, the
rewards, and the pull back to old models. Mixing moves the model by alpha (w_i - w), and ::

    w_i - w = d + (1 - beta) (w_o - w) + beta (w_g - w)

d is what training produced; the rest points back to earlier models of the server. The table shows the lengths of both
parts, the share that is not progress, and the cosine between them.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from freshet import Federation
from freshet.config import load_tables, resolve
from freshet.core.messages import Upload
from freshet.core.server import ActiveTrip, Server
from freshet.methods.fedasmu import FedASMU
from freshet.runs.reader import RunDirectory

PARTS = 5
Row = dict[str, float]


@contextmanager
def recording(rows: list[Row]) -> Iterator[None]:
    """Record for every upload how much of it is progress and how much points back."""
    receive = FedASMU.receive

    def record(self: FedASMU, server: Server, upload: Upload, trip: ActiveTrip) -> Any:
        n, base = self.context.layout.learnable, server.store.get(trip.base)
        fresh = {merge.version: server.store.get(merge.version) for merge in upload.merges}
        start = upload.anchor(base, fresh)[:n].astype(np.float64)
        d, back = upload.weights[:n] - start, start - server.weights[:n]
        lengths = float(np.linalg.norm(d)), float(np.linalg.norm(back))
        both = lengths[0] * lengths[1]
        rows.append({"d": lengths[0], "back": lengths[1], "cosine": float(d @ back) / both if both else 0.0})
        return receive(self, server, upload, trip)

    FedASMU.receive = record  # type: ignore[method-assign]
    try:
        yield
    finally:
        FedASMU.receive = receive  # type: ignore[method-assign]


def fifths(rows: Sequence[Any]) -> list[Sequence[Any]]:
    return [rows[len(rows) * k // PARTS : len(rows) * (k + 1) // PARTS] for k in range(PARTS)]


def line(name: str, rows: Sequence[Any], value: Callable[[Any], float], fold: Callable[..., float] = median) -> None:
    found = (fold([value(row) for row in part]) if part else float("nan") for part in fifths(rows))
    print(f"{name:34}" + "".join(f"{each:12.5g}" for each in found))


def print_table(run: RunDirectory, rows: Sequence[Row]) -> None:
    """Print one line per quantity and one column per fifth of the run."""
    events = list(run.events())
    aggregates = [event for event in events if event["kind"] == "aggregate"]
    merges = [event for event in events if event["kind"] == "merge"]
    requests = [event for event in events if event["kind"] == "request"]
    print(f"{len(aggregates)} aggregations, {len(requests)} requests, {len(merges)} merges; medians of each fifth\n")
    line("staleness", aggregates, lambda event: event["contributions"][0]["staleness"])
    line("alpha", aggregates, lambda event: event["alpha"])
    for name in ("lambda", "sigma", "iota"):
        line(name, aggregates, itemgetter(name))
    adapted = [event for event in aggregates if event["adapted"]]
    line("|q|, slope along the last step", adapted, lambda event: abs(event["q"]))
    line("slopes that ask for more", adapted, lambda event: float(event["q"] < 0), fmean)
    line("beta", merges, lambda event: event["beta"])
    line("gamma", merges, lambda event: event["gamma_after"])
    line("upsilon", merges, lambda event: event["upsilon_after"])
    line("reward, mean", merges, lambda event: event["reward"], fmean)
    line("reward, share above 0", merges, lambda event: event["reward"] > 0, fmean)
    line("requested slot, mean", requests, lambda event: event["slot"], fmean)
    line("|d|, progress", rows, lambda row: row["d"])
    line("|back|, what points back", rows, lambda row: row["back"])
    line("back / (d + back)", rows, lambda row: row["back"] / (row["back"] + row["d"]))
    line("cosine of d and back", rows, lambda row: row["cosine"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--until", type=float, default=1500.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tables = load_tables(arguments.config)
    tables["run"] |= {"until": arguments.until, "seed": arguments.seed, "executor": "serial"}
    tables["data"] |= {"validation": 0.0}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, recording(rows):
        result = Federation.from_config(resolve(tables)).run(out=Path(folder) / "run")
        print_table(RunDirectory(result.directory), rows)


if __name__ == "__main__":
    main()
