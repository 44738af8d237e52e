"""Make the figures on controls in docs/methods-appendix.md, all on validation samples or training loss.

    python scripts/controls.py first     initial controls on the embedded digits: seconds to 0.85, last tests, seeds 1-3
    python scripts/controls.py slopes    the slope that controls descend, compared with finite differences
    python scripts/controls.py judge     which devices' aggregations are judged, and what the verdicts say
    python scripts/controls.py course    alpha learned from three initial values, Fashion-MNIST, seed 1000

The slope of an adaptation is ``q ~ <grad F_i(w_p), step>``: how the loss of device i changes along the step by which
its last upload made the model ``w_p``. The server takes the gradient from the device's next upload, which started
``gap`` versions later. The true slope is ``(F_i(w_p + h step) - F_i(w_p - h step)) / 2 h``, on all its samples.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from freshet import Federation
from freshet.config import load_tables, resolve
from freshet.core.messages import Upload
from freshet.core.method import Aggregate
from freshet.core.server import ActiveTrip, Server
from freshet.core.vectors import Vector
from freshet.methods.fedasmu import FedASMU
from freshet.result import Result
from freshet.runs.reader import RunDirectory
from freshet.training.batches import Samples
from freshet.training.network import FlatModel

DIGITS = {
    "data": {"name": "digits", "concentration": 0.3, "validation": 0.2},
    "fleet": {"devices": 40, "ratio": 5.0, "time": "trip"},
    "training": {"lr": 0.1},
}
SEEDS, TARGET = (1, 2, 3), 0.85
#: Method, initial controls (None: its defaults), and seconds.
FIRST: list[tuple[str, tuple[float, float, float] | None, int]] = [
    ("fedasmu", (10, 0.5, 0), 400),
    ("fedasmu", (6, 0.5, 0), 400),
    ("fedasmu", (6, 0.2, 0), 400),
    ("fedasmu", (10, 0.8, 0.1), 400),
    ("fedasmu", (3, 0.5, 0.1), 400),
    ("fedasmu-progress", (1, 0.5, 0.05), 400),
    ("fedssmu", (3, 0.8, 0.05), 1000),
    ("fedssmu", (1, 0.7, 0.1), 1000),
    ("fedssmu", (5, 1.2, 0.05), 1000),
    ("fedssmu", (2, 0.8, 0.2), 1000),
    ("fedssmu", (3, 1, 0), 1000),
    ("fedssmu", (1, 0.7, 0), 1000),
    ("fedssmu-progress", (0.3, 0.1, 0.1), 1000),
    ("fedavg", None, 1000),
]
#: Initial lambda and iota: far too small, tuned, far too large.
INITIAL_CONTROLS: dict[str, dict[str, float]] = {
    "far too small": {"iota0": 0.002, "lambda0": 0.1},
    "tuned": {},
    "far too large": {"iota0": 0.25},
}
FIXED = {f"eta_{name}": 0.0 for name in ("lambda", "sigma", "iota")}
TUNED = Path(__file__).parent.parent / "results" / "lenet-fmnist" / "tune" / "fedasmu-progress" / "best.toml"


def run(tables: dict[str, Any], until: float, seed: int, read: Callable[[Result], Any]) -> Any:
    """Run in a temporary directory and return what ``read`` finds there."""
    settings = tables | {"run": tables.get("run", {}) | {"seed": seed, "until": until, "executor": "serial"}}
    with tempfile.TemporaryDirectory() as folder:
        return read(require_finished(Federation.from_config(resolve(settings)).run(out=Path(folder) / "run")))


def require_finished(result: Result) -> Result:
    """Return the result, or exit if the run was interrupted."""
    if result.summary["status"] == "interrupted":
        raise SystemExit("interrupted")
    return result


def print_first() -> None:
    """Print the table of initial controls in Markdown."""
    print(f"| | lambda0, sigma0, iota0 | until | seconds to {TARGET} | last five tests |\n|---|---|---|---|---|")
    for name, controls, until in FIRST:
        given = {} if controls is None else dict(zip(("lambda0", "sigma0", "iota0"), map(float, controls), strict=True))
        tables = DIGITS | {"method": {"name": name, **given}, "run": {"eval_every": 10.0}}
        tests = [run(tables, until, seed, lambda result: RunDirectory(result.directory).metrics()) for seed in SEEDS]
        times = (next((f"{row['time']:.0f}" for row in rows if row["accuracy"] >= TARGET), "–") for rows in tests)
        last = fmean(fmean(row["accuracy"] for row in rows[-5:]) for rows in tests)
        shown = "" if controls is None else ", ".join(f"{value:g}" for value in controls)
        print(f"| {name} | {shown} | {until} s | {' / '.join(times)} | {last:.3f} |", flush=True)


class SlopeRecorder:
    """Records for every adaptation the slope that the server used, the true one, and the gap."""

    def __init__(self, federation: Federation) -> None:
        self.model = FlatModel(federation.factory())
        self.samples, self.shards = Samples.of(federation.dataset, test=False), federation.shards
        self.last_updates: dict[int, tuple[Vector, Vector]] = {}
        self.found: list[tuple[float, float, int]] = []

    def loss(self, weights: Vector, device: int) -> float:
        """Return ``F_i``, the mean loss on all samples of a device."""
        self.model.load(weights)
        x, y = self.samples.take(torch.from_numpy(self.shards[device]))
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(self.model.module.eval()(x).double(), y))

    def true_slope(self, device: int, h: float = 0.02) -> float:
        """Return the slope at the model that the device's last upload made, along the step that made it."""
        made, step = self.last_updates[device]
        ahead, back = (self.loss((made + sign * h * step).astype(np.float32), device) for sign in (1, -1))
        return (ahead - back) / (2 * h)

    @contextmanager
    def recording(self) -> Iterator[None]:
        receive, recorder = FedASMU.receive, self

        def record(self: FedASMU, server: Server, upload: Upload, trip: ActiveTrip) -> Any:
            device, step = upload.device, upload.weights - server.weights
            verdict = receive(self, server, upload, trip)
            if isinstance(verdict, Aggregate):
                numbers = verdict.numbers
                if numbers["adapted"]:
                    recorder.found.append((numbers["q"], recorder.true_slope(device), numbers["gap"]))
                recorder.last_updates[device] = verdict.weights, step
            return verdict

        FedASMU.receive = record  # type: ignore[method-assign]
        try:
            yield
        finally:
            FedASMU.receive = receive  # type: ignore[method-assign]


def print_slopes() -> None:
    """Compare the slopes of a default run of 600 s on the digits with the true ones."""
    tables = {"method": {"name": "fedasmu"}, "run": {"until": 600.0, "executor": "serial"}}
    federation = Federation.from_config(resolve(tables))
    recorder = SlopeRecorder(federation)
    with tempfile.TemporaryDirectory() as folder, recorder.recording():
        require_finished(federation.run(out=Path(folder) / "run"))
    used, true, gaps = zip(*recorder.found, strict=True)
    agree = fmean(q * t > 0 for q, t in zip(used, true, strict=True))
    size = median(abs(q / t) for q, t in zip(used, true, strict=True) if t)
    print(f"{len(used)} adaptations: the sign agrees in {agree:.0%}, the size is {size:.2f} of the true one (median)")
    print(f"gap: {median(gaps):g} versions (median), 0 in {fmean(gap == 0 for gap in gaps):.0%}")


def print_judged() -> None:
    """Compare the two readings of the aggregation that an upload judges, in a default run of 600 s on the digits."""

    def read(result: Result) -> str:
        events = [event for event in RunDirectory(result.directory).events() if event["kind"] == "aggregate"]
        adapted = [event for event in events if event["adapted"]]
        judged = {event.get("judged", event["contributions"][0]["device"]) for event in adapted}
        gap, more = median(event["gap"] for event in adapted), fmean(event["q"] < 0 for event in adapted)
        return f"{len(adapted)} | {len(judged)} | {gap:g} | {more:.1%}"

    print("| judge | adaptations | devices judged | gap, median | verdicts that say more |\n|---|---|---|---|---|")
    for judge in ("own", "base"):
        found = run({"method": {"name": "fedasmu", "judge": judge}}, 600.0, 0, read)
        print(f"| `{judge}` | {found} |", flush=True)


def print_course() -> None:
    """Print the final validation accuracy and, in brackets, alpha in the last fifth, by initial controls."""

    def read(result: Result) -> str:
        alphas = [event["alpha"] for event in RunDirectory(result.directory).events() if event["kind"] == "aggregate"]
        rows = RunDirectory(result.directory).metrics()
        return f"{fmean(row['accuracy'] for row in rows[-5:]):.3f} ({median(alphas[len(alphas) * 4 // 5 :]):.3f})"

    print("| initial alpha | fixed | course |\n|---|---|---|")
    tuned = load_tables(TUNED)
    tuned["data"] |= {"validation": 0.2}
    for name, initial in INITIAL_CONTROLS.items():
        rows = []
        for change in (FIXED if initial else {}, {"controls": "course", **dict.fromkeys(FIXED, 0.005)}):
            tables = tuned | {"method": tuned["method"] | initial | change}
            rows.append(run(tables, 1500.0, 1000, read))
        print(f"| {name} | {' | '.join(rows)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("first", "slopes", "judge", "course"))
    prints = {"first": print_first, "slopes": print_slopes, "judge": print_judged, "course": print_course}
    prints[parser.parse_args().what]()


if __name__ == "__main__":
    main()
