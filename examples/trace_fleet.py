"""A fleet from a trace: phones that are available while they charge at night, and tablets that get slower.

python examples/trace_fleet.py          (FRESHET_SHORT=1 for a few seconds)
"""

import csv
import os
from pathlib import Path

import numpy as np

import freshet

SHORT = bool(os.environ.get("FRESHET_SHORT"))
HOUR = 3600


def write(path: Path, phones: int, tablets: int) -> None:
    """Write one row per device and change. An empty cell keeps the value of the row before (docs: Fleets)."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["device", "from", "seconds_per_sample", "up_mbps", "down_mbps", "available", "cycle"])
        for number in range(phones):
            plugged_in = int(rng.integers(0, 4)) * HOUR
            unplugged = plugged_in + int(rng.integers(1, 4)) * HOUR
            rows.writerow([f"phone{number}", 0, round(rng.uniform(0.5, 5.0), 3), 5, 20, 0, 24 * HOUR])
            rows.writerow([f"phone{number}", plugged_in + 60, "", "", "", 1, ""])
            rows.writerow([f"phone{number}", unplugged, "", "", "", 0, ""])
        for number in range(tablets):
            speed = round(rng.uniform(1.0, 3.0), 3)
            rows.writerow([f"tablet{number}", 0, speed, 2, 10, 1, ""])
            rows.writerow([f"tablet{number}", HOUR, 3 * speed, "", "", "", ""])


trace = Path("phones.csv")
write(trace, phones=30, tablets=10)
federation = freshet.Federation(
    method="fedasmu",
    fleet={"trace": str(trace)},  # trains on the digits; the file sets the number of devices
    run={"per_round": 5, "period": 60, "eval_every": 600},
)
result = federation.run(until="1h" if SHORT else "8h")
summary = result.summary
print(
    f"{len(federation.fleet)} devices, accuracy {result.accuracy[-1]:.2f} after {summary['virtual_time'] / HOUR:.1f} h"
)
print(f"{summary['uploads']} uploads, {summary['lost']} trips lost because a device left")
