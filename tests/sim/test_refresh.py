"""Several fresh models per trip, asked for or pushed: causal, counted, the same bits however a run is computed."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import Federation
from freshet.core.messages import CONTROL_BYTES
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.conftest import small
from tests.sim.helpers import Crash, CrashError, outputs

MODEL = 4 * 650
EVERY: dict[str, Any] = {"name": "fedasmu", "slot": 2, "refresh": "every"}
TWICE: dict[str, Any] = {"name": "fedasmu", "refresh": 2, "epsilon": 0.5}
PUSH: dict[str, Any] = {"name": "fedasmu", "slot": "never", "push_after": 2}
ROUNDS: dict[str, Any] = {"name": "fedssmu", "slot": 2, "refresh": 3}
PUSHED_ROUNDS: dict[str, Any] = {"name": "fedssmu", "slot": "never", "push_after": 1}
PROGRESS: dict[str, Any] = {"name": "fedasmu-course", "slot": "never", "push_after": 1}
KINDS = {"every": EVERY, "twice": TWICE, "push": PUSH, "rounds": ROUNDS, "pushed rounds": PUSHED_ROUNDS}
KINDS |= {"progress": PROGRESS}
REBASE: dict[str, Any] = {"name": "fedasmu-course", "merge": "rebase", "beta": "learned"}
KINDS |= {
    "rebase": REBASE | {"slot": 3, "beta": 1.0},
    "rebase every": REBASE | {"slot": 2, "refresh": "every"},
    "rebase pushed": REBASE | {"slot": "never", "push_after": 1, "beta": 1.0},
    "rebase in rounds": REBASE | {"name": "fedssmu-progress", "slot": 2, "refresh": 2},
    "fedbuff": {"name": "fedbuff", "fresh": "rebase", "K": 3},
    "asofed": {"name": "asofed", "fresh": "rebase", "slot": 2, "refresh": "every"},
    "fedasync": {"name": "fedasync", "fresh": "rebase", "slot": "random"},
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = KINDS[request.param]
    return found


def events(directory: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(directory).events() if event["kind"] in kinds]


def by_trip(rows: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if "trip" in row:
            found.setdefault((row["device"], row["trip"]), []).append(row)
    return found


def test_each_request_is_one_epoch_after_the_last_answer(tmp_path: Path) -> None:
    federation = small(EVERY)
    fleet = federation.fleet
    federation.run(60, out=tmp_path / "run")
    several = 0
    for (device, _), rows in by_trip(events(tmp_path / "run", "request", "merge", "upload")).items():
        up = fleet.upload_seconds(device, CONTROL_BYTES)
        for request, later in pairwise([row for row in rows if row["kind"] != "merge"]):
            down = fleet.download_seconds(device, CONTROL_BYTES if request["fresh"] is None else MODEL)
            leg = fleet.upload_seconds(device, MODEL) if later["kind"] == "upload" else up
            epoch = fleet.train_seconds[device] / 4
            assert later["time"] - request["time"] == pytest.approx(down + epoch + leg, rel=1e-9)
        merges = [row for row in rows if row["kind"] == "merge"]
        answers = {row["fresh"]: row for row in rows if row["kind"] == "request" and row["fresh"] is not None}
        for merge in merges:
            asked = answers[merge["fresh"]]
            assert merge["time"] - asked["time"] == pytest.approx(fleet.download_seconds(device, MODEL), rel=1e-9)
            assert merge["slot"] == asked["slot"]
        several += len(merges) > 1
    assert several > 3


def test_pushed_model_is_merged_at_the_first_epoch_after_it_arrives(tmp_path: Path) -> None:
    federation = small(PUSH)
    fleet = federation.fleet
    result = federation.run(60, out=tmp_path / "run")
    rows = events(tmp_path / "run", "trigger", "push", "merge")
    merged = 0
    for (device, _), trip in by_trip(rows).items():
        start = trip[0]["time"] + fleet.download_seconds(device, MODEL)
        epoch = fleet.train_seconds[device] / 4
        for place, row in enumerate(trip):
            if row["kind"] != "push":
                continue
            assert row["time"] >= start, "the base is still on its way"
            arrives = row["time"] + fleet.download_seconds(device, MODEL)
            boundary = start + np.ceil((arrives - start) / epoch - 1e-9) * epoch
            later = trip[place + 1 : place + 2]
            if later:
                assert later[0]["kind"] == "merge", "no second push while one is pending"
                assert later[0]["fresh"] == row["fresh"] and later[0]["time"] == pytest.approx(boundary)
                assert later[0]["slot"] == round((boundary - start) / epoch) + 1
                merged += 1
    pushes = sum(row["kind"] == "push" for row in rows)
    assert 0 < merged < pushes == result.summary["pushes"], "some arrive in the last epoch or after the end"
    assert result.summary["requests"] == 0


def test_pushes_come_with_the_first_upload_that_puts_the_server_far_enough_ahead(tmp_path: Path) -> None:
    small(PUSH, fleet={"down_mbps": 0.0, "down_latency": 0.0}).run(60, out=tmp_path / "run")
    held: dict[int, int] = {}
    pending: set[int] = set()  # those who merge meanwhile are due with the next upload
    version, merged = 1, set[int]()
    for row in events(tmp_path / "run", "trigger", "push", "merge", "upload", "aggregate"):
        device = row["device"]
        if row["kind"] == "trigger":
            held[device] = row["version"]
            pending.discard(device)
        elif row["kind"] == "push":
            assert row["fresh"] == version and version - held[device] >= 2
            held[device] = row["fresh"]
            pending.add(device)
        elif row["kind"] == "merge":
            merged.add(device)
        elif row["kind"] == "upload":
            held.pop(device)
        else:
            late = [d for d, v in held.items() if version - v >= 2 and d not in pending]
            assert not late, "every device that was due before this version was pushed to"
            version += 1
            pending -= merged
            merged.clear()


def test_bytes_are_counted(tmp_path: Path) -> None:
    summary = small(PUSH).run(60, out=tmp_path / "push").summary
    assert summary["bytes_down"] == MODEL * (summary["trips"] + summary["pushes"])
    summary = small(EVERY).run(60, out=tmp_path / "every").summary
    fresh = sum(row["fresh"] is not None for row in events(tmp_path / "every", "request"))
    empty = summary["requests"] - fresh
    assert summary["bytes_down"] == MODEL * (summary["trips"] + fresh) + CONTROL_BYTES * empty


def test_workers_and_resume_give_the_same_bits(kind: dict[str, Any], tmp_path: Path) -> None:
    def federation(executor: str = "serial") -> Federation:
        return small(kind, run={"executor": executor, "workers": 2, "checkpoint_every": 7.0})

    whole = federation().run(60, out=tmp_path / "whole")
    assert whole.summary["merges"] > 3 and audit(RunDirectory(tmp_path / "whole")).problem is None
    federation("processes").run(60, out=tmp_path / "workers")
    assert outputs(tmp_path / "workers") == outputs(tmp_path / "whole")
    for after in (20, 45):
        cut = tmp_path / f"cut{after}"
        with pytest.raises(CrashError):
            federation().run(60, out=cut, observers=[Crash(after)])
        federation().resume(cut)
        assert outputs(cut) == outputs(tmp_path / "whole")


@pytest.mark.parametrize("first", [20.0, 27.0, 33.0])
def test_extended_run_equals_one_that_was_longer_from_the_start(
    kind: dict[str, Any], first: float, tmp_path: Path
) -> None:
    small(kind).run(50, out=tmp_path / "whole")
    small(kind).run(first, out=tmp_path / "part")
    small(kind).resume(tmp_path / "part", until=50)
    assert outputs(tmp_path / "part")[:2] == outputs(tmp_path / "whole")[:2]


def test_devices_that_leave_after_a_merge_keep_what_they_learned(kind: dict[str, Any], tmp_path: Path) -> None:
    fleet = {"loss": 0.2, "on_seconds": 25.0, "off_seconds": 6.0}

    def federation(executor: str) -> Federation:
        method = kind if "fresh" in kind else kind | {"eta_gamma": 0.05, "eta_upsilon": 0.05}
        return small(method, fleet=fleet, run={"executor": executor, "workers": 2})

    result = federation("serial").run(80, out=tmp_path / "run")
    assert result.summary["lost"] > 3 and audit(RunDirectory(tmp_path / "run")).problem is None
    federation("processes").run(80, out=tmp_path / "workers")
    assert outputs(tmp_path / "workers") == outputs(tmp_path / "run")


def test_compressed_links_and_trips_that_diverge(kind: dict[str, Any], tmp_path: Path) -> None:
    for name, given in {
        "links": {"links": {"up": "topk", "down": "int8"}},
        "diverging": {"training": {"lr": 3e3, "lr_decay": 1.0}, "run": {"diverged": "continue"}},
    }.items():
        small(kind, **given).run(40, out=tmp_path / name)
        assert audit(RunDirectory(tmp_path / name)).problem is None


def tampered(directory: Path, change: Any) -> str | None:
    path = directory / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return audit(RunDirectory(directory)).problem


def test_audit_finds_a_push_that_came_too_early(tmp_path: Path) -> None:
    small(PUSH).run(40, out=tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("push_after = 2", "push_after = 4"))
    assert "within push_after 4" in (audit(RunDirectory(tmp_path / "run")).problem or "")


def test_audit_finds_changed_pushes_and_merges(tmp_path: Path) -> None:
    small(PUSH).run(40, out=tmp_path / "push")

    def older(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if line["kind"] == "push")["fresh"] -= 1

    assert "not the newest model" in (tampered(tmp_path / "push", older) or "")
    small(EVERY).run(40, out=tmp_path / "every")

    def several(line: dict[str, Any]) -> bool:
        return line["kind"] == "aggregate" and isinstance(line["beta"], list)

    def heavier(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if several(line))["beta"][1] += 1e-3

    assert "beta" in (tampered(tmp_path / "every", heavier) or "")


def test_audit_finds_a_further_request_that_got_an_old_model(tmp_path: Path) -> None:
    small(EVERY).run(40, out=tmp_path / "run")

    def repeat(lines: list[dict[str, Any]]) -> None:
        rows = by_trip([line for line in lines if line["kind"] == "request" and line["fresh"] is not None])
        first, second = next(trip for trip in rows.values() if len(trip) > 1)[:2]
        second["fresh"] = first["fresh"]

    assert "which the device had" in (tampered(tmp_path / "run", repeat) or "")
