"""The results of a grid as files: JSON with everything, CSV with one row per method and world."""

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freshet.report.columns import DEVICES
from freshet.report.export import harmless
from freshet.runs.writer import write_atomically

_SPREADS = ("accuracy", "best", "time_raw", "time_mean")
_MEDIANS = (
    *DEVICES,
    "bytes_up",
    "bytes_down",
    "bytes_fresh",
    "mean_staleness",
    "discards",
    "rejected",
    "trips",
    "wall_seconds",
)


def rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row per method and world, for a spreadsheet."""
    scale = (results["scale"] or {"scale": 1})["scale"]
    return [_row(world, line, scale) for world in results["worlds"] for line in world["lines"]]


def _row(world: Mapping[str, Any], line: Mapping[str, Any], scale: float) -> dict[str, Any]:
    row = {"world": world["name"], "method": line["label"], "kind": line["kind"], "scale": scale}
    row |= {"finished": line["finished"], "failed": line["failed"], "all": line["all"]}
    ends = [f"{each['time']:g}" for each in line["diverged"]]
    row |= {"diverged": len(ends), "diverged_at": " ".join(ends), "target": world["target"], "until": world["until"]}
    for name in _SPREADS:
        row |= {f"{name}_{part}": line[name][part] for part in ("median", "low", "high")}
    row["reached"] = line["time_raw"]["count"]
    row |= {name: line[name]["median"] for name in _MEDIANS}
    against = line.get("against", {})
    row["reference"] = against.get("reference")
    for name in ("raw", "mean"):
        ratio = against.get(f"time_{name}") or {}
        row |= {f"time_{name}_vs_reference": ratio.get("ratio"), f"time_{name}_bound": ratio.get("bound")}
    row |= {f"accuracy_vs_reference_{part}": against.get(part) for part in ("difference", "p", "pairs")}
    paper = line["published"] or {}
    return row | {f"published_{part}": paper.get(part) for part in ("accuracy", "time")}


def write(results: Mapping[str, Any], folder: Path, stem: str = "comparison") -> tuple[Path, Path]:
    """Write ``stem.json`` and ``stem.csv`` into a folder, each as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    table = rows(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: harmless(value) if isinstance(value, str) else value for key, value in row.items()} for row in table
    )
    files = folder / f"{stem}.json", folder / f"{stem}.csv"
    write_atomically(files[0], (json.dumps(results, indent=2) + "\n").encode())
    write_atomically(files[1], text.getvalue().encode())
    return files
