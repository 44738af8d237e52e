"""The content of summary.json, and remarks on what to know before reading its numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from freshet._version import __version__
from freshet.core.events import Record
from freshet.core.vectors import Vector
from freshet.privacy import describe
from freshet.runs.records import ACCURACY, Metric, first_crossing
from freshet.runs.writer import weights_sha256

Rows = Sequence[Mapping[str, Any]]
#: A remark is made if at least one upload in this many is rejected.
REJECTED_SHARE = 20
SEE_REASONS = "see the reasons in events.jsonl"


def time_to_target(rows: Rows, target: float | None, metric: Metric = ACCURACY) -> float | None:
    """Time of the first test that reaches the target."""
    return first_crossing([row["time"] for row in rows], [metric.of(row) for row in rows], target, metric)


def tests_since_best(rows: Rows, metric: Metric = ACCURACY) -> int:
    """How many tests there were after the first one with the best value; a test without a value is no better.

    A model that is tested again counts once.
    """
    versions = [row.get("version") for row in rows]
    repeated = {place for place in range(1, len(rows)) if versions[place] == versions[place - 1] is not None}
    new = [row for place, row in enumerate(rows) if place not in repeated]
    values = [metric.of(row) for row in new]
    best = metric.best(values)
    return len(values) if best is None else len(values) - 1 - values.index(best)


def summarise(
    head: Mapping[str, Any],
    rows: Rows,
    target: float | None,
    facts: Mapping[str, Any],
    weights: Vector,
    wall: float,
    metric: Metric = ACCURACY,
) -> Record:
    """summary.json from the run's identity (``head``), tests (``rows``), driver counts (``facts``) and final model."""
    values = [metric.of(row) for row in rows]
    return {
        **head,
        "metric": metric.name,
        "direction": metric.direction,
        f"final_{metric.name}": values[-1] if rows else None,
        f"best_{metric.name}": metric.best(values),
        "final_loss": rows[-1]["loss"] if rows else None,
        **latest_device_scores(rows),
        "target": target,
        "time_to_target": time_to_target(rows, target, metric),
        **facts,
        "weights_sha256": weights_sha256(weights),
        "wall_seconds": round(wall, 3),
        "freshet": __version__,
    }


def latest_device_scores(rows: Rows) -> Record:
    """Median, 10th percentile, worst, best and Jain's index over the devices, from the last test that has them."""
    last = next((row for row in reversed(rows) if "devices_median" in row), {})
    return {key: value for key, value in last.items() if key.startswith(("devices_", "personal_"))}


def remarks(summary: Mapping[str, Any], rows: Rows) -> list[str]:
    """What to know about a run before reading its numbers, one sentence each."""
    sentences, uploads, rejected = [], summary["uploads"], summary["rejected"]
    diverged = summary.get("diverged")
    if diverged is not None:
        loss = next((row["loss"] for row in rows if row["time"] == diverged), None)
        sentences.append(f"{summary['method']} {_divergence(diverged, loss)}")
    if summary.get("stopped"):
        sentences.append(f"{summary['method']} was stopped at {summary['virtual_time']:g} s: {summary['stopped']}")
    skipped = summary.get("adaptations_skipped")
    if skipped:
        whole = skipped + summary["adaptations"]
        sentences.append(
            f"{summary['method']}: {skipped} of {whole} adaptations were skipped: their steps were forgotten"
        )
    stalled = summary.get("stalled")
    if stalled is not None:
        waits = f"has waited since {stalled:g} s of {summary['virtual_time']:g} for devices that do not return"
        sentences.append(f"{summary['method']} {waits}; set run.round_deadline (seconds) to give them up")
    lost, trips = summary.get("lost", 0), summary.get("trips", 0)
    if summary.get("status") == "finished" and not uploads and 2 * lost <= trips and stalled is None:
        silence = _real_silence if summary.get("real_time") else _silence
        sentences.append(f"{summary['method']}: {silence(summary['virtual_time'], trips)}")
    if 2 * lost > trips:
        away = "a device that is online for less than a trip (fleet.on_seconds) never uploads; "
        hint = "" if summary.get("real_time") else away
        sentences.append(f"{summary['method']}: {lost} of {trips} trips were lost; {hint}{SEE_REASONS}")
    if rejected and REJECTED_SHARE * rejected >= uploads:
        share = "all" if rejected >= uploads else f"{rejected} of"
        wild = 2 * summary.get("wild", 0) > rejected
        remedy = "most were not finite or far larger than usual; try a smaller training.lr" if wild else SEE_REASONS
        sentences.append(f"{summary['method']}: {share} {uploads} uploads were rejected; {remedy}")
    if summary.get("changes"):
        changes = ", ".join(summary["changes"])
        sentences.append(
            f"{summary['method']} was resumed with other software ({changes}); its bits cannot be repeated"
        )
    if summary.get("privacy"):
        sentences.append(describe(summary["privacy"]))
    return sentences


def _divergence(time: float, loss: float | None) -> str:
    if time == 0:
        return "began with a test loss that is not finite; check the model's outputs and the test data"
    size = "is not finite" if loss is None else f"{loss:.2g}"
    return f"diverged at {time:g} s: test loss {size}; try a smaller training.lr"


def _real_silence(time: float, trips: int) -> str:
    """Why no upload arrived at a deployment."""
    if trips:
        waits = f"{trips} trips were in flight; a later run.until lets them end"
        return f"no upload arrived in {time:g} s, and {waits}, and the devices' own output says what they do"
    return f"no upload arrived in {time:g} s: no device was online; start them with freshet deploy device"


def _silence(time: float, trips: int) -> str:
    """Why no upload arrived."""
    if trips:
        return f"no upload arrived in {time:g} s, and {trips} trips were in flight; a later run.until lets them end"
    settings = "a trace's available and from, fleet.on_seconds and off_seconds, run.until"
    return f"no upload arrived in {time:g} s: no device was available; check {settings}"
