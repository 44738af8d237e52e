"""Made-up archived runs for the tests of the results pages."""

import json
from pathlib import Path
from typing import Any
from zlib import crc32


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
    fleet: str = "fastest = 10.0\n",
    schedule: str = "",
) -> Path:
    """Write one run to folder/runs, tested every 100 s, with a log that is not archived."""
    run = folder / "runs" / f"{method}-seed{seed}-{crc32(options.encode()):x}"
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
    training = f"[training]\nlr = {lr}\noptimiser = {optimiser!r}\nbatch_size = 25\n{schedule}"
    training += f"[fleet]\n{fleet}"
    tables = f"{training}[data]\nname = {world[0]!r}\ntrain_samples = {samples}\n[model]\nname = {world[1]!r}\n{model}"
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.toml").write_text(f"{tables}[method]\n{options}")
    (run / "world.json").write_text("{}")
    (run / "events.jsonl").write_text("large")
    return run


NEW_WORLD: dict[str, Any] = {
    "fleet": "fastest = 190.0\nup_mbps = 0.0\ndown_mbps = 0.0\n",
    "schedule": "schedule_by = 'time'\n",
    "world": ("cifar10", "lenet5"),
    "samples": 10_000,
}


def write_ablation(folder: Path, finals: dict[str, float], tests: dict[str, int] | None = None) -> None:
    """Three runs of the new world by name (``fedasmu-da``, ``slot = h1``), each seed a little better than the last.

    ``tests`` counts the tests before this accuracy is reached, 12 by default. Their summaries name no time to a target.
    """
    for name, final in finals.items():
        key, _, value = name.partition(" = ")
        method, options = ("fedasmu", f"{key} = {value!r}\n") if value else (name, "")
        before = (tests or {}).get(name, 12)
        for seed in range(3):
            curve = [0.1] * before + [final + 0.001 * seed] * (30 - before)
            write_run(folder, method, seed, curve, None, options, **NEW_WORLD)
