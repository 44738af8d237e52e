"""Make the pre-trained meta model that Freshet ships, ``src/freshet/methods/asmu/meta5.safetensors``.

    python scripts/meta_model.py [FILE]

The paper pre-trains its meta model "using historical data". The recipe here: six FedASMU runs on the embedded digits
(40 devices, 5 epochs, 1,200 s) in which every device asks in a random slot, so that each slot is seen equally often.
Then the printed update, ``theta += eta_rl grad log P(l*) (R - b)``, over all requests, five times, at a rate of 0.05. A
request that found nothing newer has R = 0. The paper names neither its data nor its rate. Rewards are a few hundredths,
so its online rate of 0.001 would leave the model as it was. The file holds for any machine; its last digits depend on
PyTorch's version.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from freshet import Federation
from freshet.methods.asmu.meta import SHIPPED, MetaSelector, pretrain
from freshet.methods.asmu.rule import ASMUOptions
from freshet.runs.reader import RunDirectory

EPOCHS, SEEDS, SECONDS, RATE, PASSES = 5, range(6), 1200.0, 0.05, 5


def main(out: Path) -> None:
    """Run, learn, and write the file."""
    selector = MetaSelector(EPOCHS, RATE, ASMUOptions().rho, seed=0)
    print("before", selector.distribution().round(3))
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            run = {"until": SECONDS, "seed": seed, "eval_every": SECONDS}
            method = {"name": "fedasmu", "slot": "random"}
            result = Federation(method=method, training={"epochs": EPOCHS}, run=run).run(out=Path(folder) / str(seed))
            events += RunDirectory(result.directory).events()
    count = pretrain(selector, events, PASSES)
    selector.save(out)
    print("after ", selector.distribution().round(3), f"{PASSES} x {count} requests")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
