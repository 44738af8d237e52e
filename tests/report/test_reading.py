"""Finding runs, and reading their logs line by line: only a few records are held at once."""

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from freshet import Result
from freshet.cli import util as bar
from freshet.errors import RunError
from freshet.report import live
from freshet.report.export import tidy
from freshet.report.page import READS_PER_LOG, document, report
from freshet.report.reading import Log, find, read, read_all, runs_to
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

from .conftest import Write
from .helpers import lines


def test_runs_are_found_as_folders_and_in_folders(written: Write, tmp_path: Path) -> None:
    a, b = written("runs/a"), written("runs/b")
    assert find([tmp_path / "runs"]).runs == [a, b]
    assert find([a, tmp_path / "nowhere"]).runs == [a, tmp_path / "nowhere"], "whoever reads it says so"


def test_what_compare_tune_and_paper_write_is_found_also_side_by_side(written: Write, tmp_path: Path) -> None:
    grids = [written(f"all/{name}/runs/{name}-1") for name in ("compare", "paper", "tune")]
    alone = written("all/zero")
    for name, file in (("compare", "comparison"), ("paper", "ablation"), ("tune", "tuning")):
        (tmp_path / "all" / name / f"{file}.json").write_text("{}")
        (tmp_path / "all" / name / "best.toml").write_text("")
    found = find([tmp_path / "all"])
    assert found.runs == [*grids, alone]
    assert [path.stem for path in found.results] == ["comparison", "ablation", "tuning"]
    assert find([tmp_path / "all" / "tune"]).runs == grids[2:]


def test_the_search_skips_the_insides_of_runs_hidden_folders_and_links(written: Write, tmp_path: Path) -> None:
    a = written("runs/a")
    written("runs/a/checkpoint/inner")
    written("runs/.hidden/b")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    assert find([tmp_path / "runs"]).runs == [a]
    assert find([tmp_path / "runs"]).results == [], "a run's own files are not results"


def test_a_folder_without_runs_and_results_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        find([tmp_path])


def test_a_single_place_may_be_a_path_or_a_string(written: Write, tmp_path: Path) -> None:
    a = written("runs/a")
    assert find(a) == find(str(a)) == find([str(a)])
    assert find(str(tmp_path / "runs")).runs == [a]


def test_results_alone_are_not_runs(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(RunError, match="there is no run to export"):
        runs_to("export", tmp_path)


TRIPS = 3000
#: Records that may be held while thousands are read: the one at hand, the one before it, and some tests of the model.
FEW = 10


class Counted(dict[str, Any]):
    """A record that is counted while anybody holds it."""

    now = most = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Counted.now += 1
        Counted.most = max(Counted.most, Counted.now)

    def __del__(self) -> None:
        Counted.now -= 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Counted]]:
    """Every line that is read is counted as long as it is held."""

    def loads(text: Any) -> Any:
        return json.loads(text, object_hook=lambda found: Counted(found) if "seq" in found else found)

    monkeypatch.setattr("freshet.runs.records.orjson", SimpleNamespace(loads=loads))
    Counted.now = Counted.most = 0
    yield Counted


def many(trips: int = TRIPS) -> Iterator[dict[str, Any]]:
    """A log of FedAsync: trips of two devices by turns."""
    for number in range(trips):
        device, trip, at = number % 2, number // 2 + 1, 1.0 + number
        base = number + 1
        yield {"time": at, "kind": "trigger", "device": device, "trip": trip, "version": base, "epochs": 5, "lr": 0.1}
        arrived = {"time": at + 0.5, "device": device, "trip": trip, "base": base, "version": base}
        yield arrived | {"kind": "upload", "bytes": 8}
        part = {"device": device, "base": base, "staleness": 1, "weight": 0.6}
        numbers = {"update_norm": 0.1, "contributions": [part], "alpha": 0.6, "discount": 1.0}
        yield {"time": at + 0.5, "kind": "aggregate", "version": base, "device": device, "trip": trip, **numbers}


def test_only_a_few_records_are_held_at_once(written: Write, tmp_path: Path, counted: type[Counted]) -> None:
    place = written("a", method="fedasync", events=many(), summary={"aggregations": TRIPS, "merges": 0})
    (run,) = read_all([place])
    assert run.events.kinds == {"trigger": TRIPS, "upload": TRIPS, "aggregate": TRIPS}
    assert document([run])["closeups"][0]["timeline"]["trips"]["device"][:3] == [0, 1, 0]
    assert tidy([run])[0]["label"] == "fedasync"
    report([place], tmp_path / "page.html")
    found = audit(RunDirectory(place))
    assert (found.problem, found.events) == (None, 3 * TRIPS)
    assert 1 <= counted.most <= FEW


def test_events_can_be_read_repeatedly_by_kind_or_all(written: Write) -> None:
    events = read(written("a", method="fedasync", events=many(20))).events
    for _ in range(2):
        assert [event["kind"] for event in events] == ["trigger", "upload", "aggregate"] * 20
        assert [event["version"] for event in events.of("aggregate")] == list(range(1, 21))
    assert (len(events), events.end, events.devices) == (60, 20.5, 2)
    assert list(Log()) == [] and Log().read() is False


def empty_log(folder: Path) -> tuple[Path, Log]:
    """The path of a log without lines in a new run directory, and its reader."""
    (folder / "config.toml").touch()
    (folder / "events.jsonl").touch()
    return folder / "events.jsonl", Log(RunDirectory(folder))


def test_only_complete_and_new_lines_are_read(tmp_path: Path) -> None:
    path, found = empty_log(tmp_path)
    first, second = lines([{"seq": 1, "time": 1.0, "kind": "upload"}]), '{"seq": 2, "time": 2.0'
    path.write_text(first + second)
    assert found.read() and len(found) == 1 and not found.read()
    with path.open("a") as file:
        file.write(', "kind": "lost"}\n')
    assert found.read() and [event["kind"] for event in found] == ["upload", "lost"]
    path.write_text(first)
    assert found.read() and len(found) == 1


def test_a_damaged_line_ends_reading_with_a_note(tmp_path: Path) -> None:
    path, found = empty_log(tmp_path)
    path.write_text('{"time": 1.0, "kind": "upload"}\nnonsense\n{"time": 2.0, "kind": "upload"}\n')
    found.read()
    assert found.note is not None and "line 2" in found.note
    assert [event["time"] for event in found] == [1.0]


def test_events_out_of_order_are_sorted_by_time(tmp_path: Path) -> None:
    path, found = empty_log(tmp_path)
    path.write_text(lines({"time": float(time), "kind": "upload"} for time in (3, 1, 2)))
    found.read()
    assert [event["time"] for event in found] == [1.0, 2.0, 3.0] and found.end == 3.0


# ---- the bar


def test_the_progress_bar_counts_every_byte_read(written: Write, tmp_path: Path) -> None:
    place, read_bytes = written("a", method="fedasync", events=many(50)), 0

    def seen(count: int) -> None:
        nonlocal read_bytes
        read_bytes += count

    size = (place / "events.jsonl").stat().st_size
    audit(RunDirectory(place), on_bytes=seen)
    assert read_bytes == size
    report([place], tmp_path / "page.html", on_bytes=seen)
    assert read_bytes <= (1 + READS_PER_LOG) * size and read_bytes >= 4 * size


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_is_shown_for_long_logs_on_a_terminal(
    written: Write, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    place = written("a", events=many(50))
    monkeypatch.setattr(bar, "MIN_BAR_BYTES", 1000)
    monkeypatch.setattr(bar, "BAR_STEP_BYTES", 100)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with bar.reading_bar([place], console=console) as seen:
        read(place, seen)
    assert isinstance(console.file, io.StringIO) and ("reading" in console.file.getvalue()) is terminal


# ---- watching


def test_the_first_answer_does_not_wait_for_a_long_log(
    finished: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_WAITING_BYTES", 1000)
    run = live.LiveRun(finished("fedasync").directory)
    may_read, refresh = threading.Event(), run.follower.refresh
    monkeypatch.setattr(run.follower, "refresh", lambda: may_read.wait(60) and refresh())
    first = json.loads(run.answer("") or b"")
    assert any("is being read" in note for note in first["document"]["notes"])
    assert first["document"]["worlds"][0]["accuracy"] and not first["document"]["closeups"][0].get("timeline")
    assert run.background is not None
    may_read.set()
    run.background.join(60)
    second = json.loads(run.answer(first["version"]) or b"")
    assert second["version"] != first["version"] and second["document"]["closeups"][0]["timeline"]
    assert not any("is being read" in note for note in second["document"]["notes"])
