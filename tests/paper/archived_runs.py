"""Made-up archived runs for the tests of the results pages."""

import json
from pathlib import Path


def write_run(
    folder: Path,
    method: str,
    seed: int,
    accuracies: list[float],
    reached: float | None = None,
    options: str = "",
    *,
    diverged: float | None = None,
    world: tuple[str, str] = ("fashion-mnist", "lenet5"),
    samples: int = 5000,
    lr: float = 0.03,
    optimiser: str = "sgd",
    model: str = "",
) -> Path:
    """Write one run to folder/runs, tested every 100 s, with a log that is not archived."""
    run = folder / "runs" / f"{method}-seed{seed}-{len(options):x}"
    run.mkdir(parents=True)
    rows = [{"time": 100.0 * n, "accuracy": value} for n, value in enumerate(accuracies)]
    summary = {
        "method": method,
        "seed": seed,
        "status": "finished" if diverged is None else "diverged",
        "time_to_target": reached,
        "weights_sha256": f"{seed}" * 64,
        "uploads": 600,
        "mean_staleness": 3.0,
        "diverged": diverged,
    }
    training = f"[training]\nlr = {lr}\noptimiser = {optimiser!r}\nbatch_size = 25\n"
    tables = f"{training}[data]\nname = {world[0]!r}\ntrain_samples = {samples}\n[model]\nname = {world[1]!r}\n{model}"
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.toml").write_text(f"{tables}[method]\n{options}")
    (run / "world.json").write_text("{}")
    (run / "events.jsonl").write_text("large")
    return run
