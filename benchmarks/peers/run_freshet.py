"""Freshet with two worker processes, measured like the peers: ``run_freshet.py --trips N --method fedavg``."""

import sys
import time
from pathlib import Path

from work import report, wanted

sys.path.insert(0, str(Path(__file__).parents[1]))
from simulator import CELLS, run

from freshet.compute.processes import WorkerPool


def main() -> None:
    given = wanted()
    pool = WorkerPool(given.workers)
    try:
        run(
            CELLS["lenet-fmnist"], given.method, "processes", given.workers, 1.0, pool
        )  # nobody is back after one virtual second
        first = time.time()
        run(CELLS["lenet-fmnist"], given.method, "processes", given.workers, 60.0, pool)
        until = given.trips * (5.0 if given.method == "fedavg" else 1.0) + 30.0
        seconds, trips = run(CELLS["lenet-fmnist"], given.method, "processes", given.workers, until, pool)
    finally:
        pool.close()
    report(f"Freshet {given.method}", given.workers, first, seconds, trips)


if __name__ == "__main__":
    main()
