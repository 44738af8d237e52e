"""Make the pre-trained meta models that Freshet ships: ``src/freshet/methods/asmu/meta5-async.safetensors`` and -sync.

    python scripts/meta_model.py [FOLDER]

The paper pre-trains its meta model "using historical data". The recipe here: six runs on the embedded digits (40
devices, 5 epochs) in which every device asks in a random slot, so that each slot is seen equally often. Then the
printed update, ``theta += eta_rl grad log P(l*) (R - b)``, over all requests, several times, at a rate of 0.05. A
request that found nothing newer has R = 0.

FedSSMU has its own model. In rounds of devices whose trips differ by a factor of 5, as in the paper's world
(``fleet.time = "trip"``), nothing newer exists in the first two of five slots. Its rewards are ten times smaller, so it
learns from more requests and in more passes.

The paper names neither its data nor its rate. Rewards are thousandths to hundredths, so its online rate of 0.001 would
leave the model as it was. The files hold for any machine; their last digits depend on PyTorch's version.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from freshet import Federation
from freshet.core.about import Kind
from freshet.methods.asmu.meta import SHIPPED_EPOCHS, MetaSelector, pretrain, shipped_file
from freshet.methods.asmu.rule import ASMUOptions
from freshet.runs.reader import RunDirectory

SEEDS, RATE = range(6), 0.05
#: Method, seconds of each run, fleet, and passes over the requests.
RUNS: dict[Kind, tuple[str, float, dict[str, str], int]] = {
    "async": ("fedasmu", 1200.0, {}, 5),
    "sync": ("fedssmu", 6000.0, {"time": "trip"}, 50),
}


def make(kind: Kind, out: Path) -> None:
    """Run, learn, and write one file."""
    selector = MetaSelector(SHIPPED_EPOCHS, RATE, ASMUOptions().rho, seed=0)
    method, seconds, fleet, passes = RUNS[kind]
    print(method, "before", selector.distribution().round(3))
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            run = {"until": seconds, "seed": seed, "eval_every": seconds}
            options = {"name": method, "slot": "random", "meta_from": "none"}
            federation = Federation(method=options, training={"epochs": SHIPPED_EPOCHS}, fleet=fleet, run=run)
            events += RunDirectory(federation.run(out=Path(folder) / str(seed)).directory).events()
    print_slots(events)
    count = pretrain(selector, events, passes)
    selector.save(out)
    print(method, "after ", selector.distribution().round(3), f"{passes} x {count} requests")


def print_slots(events: list[dict[str, Any]]) -> None:
    """Print the share of requests that found a newer model, and their mean reward, by slot."""
    for slot in range(1, SHIPPED_EPOCHS + 1):
        asked = [event for event in events if event["kind"] == "request" and event["slot"] == slot]
        rewards = [event["reward"] for event in events if event["kind"] == "merge" and event["slot"] == slot]
        print(f"slot {slot}: {len(rewards) / len(asked):.0%} of {len(asked)} merged, R {sum(rewards) / len(asked):.4f}")


if __name__ == "__main__":
    for each in RUNS:
        make(each, shipped_file(each) if len(sys.argv) < 2 else Path(sys.argv[1]) / shipped_file(each).name)
