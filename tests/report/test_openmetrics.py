"""Figures of a run in the OpenMetrics text format, from its directory alone."""

import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from freshet.report.openmetrics import KIND, FiguresFollower, MetricsServer

from .conftest import Write
from .helpers import serving


def event(seq: int, kind: str, time: float, **more: Any) -> dict[str, Any]:
    return {"seq": seq, "kind": kind, "time": time, **more}


def aggregation(seq: int, time: float, version: int, *staleness: int) -> dict[str, Any]:
    parts = [{"device": 0, "base": 1, "staleness": each, "weight": 0.1} for each in staleness]
    return event(seq, "aggregate", time, version=version, contributions=parts, alpha=0.1)


EVENTS = [
    event(1, "trigger", 0.0, device=0, trip=1, version=1, epochs=5),
    event(2, "trigger", 0.0, device=1, trip=1, version=1, epochs=5),
    event(3, "request", 4.0, device=0, trip=1, base=1, version=1, slot=3, slot_by="q", fresh=None),
    event(4, "upload", 9.0, device=0, trip=1, base=1, version=1, bytes=1000),
    aggregation(5, 9.0, 1, 1, 3),
    event(6, "lost", 9.5, device=1, trip=1, reason="gone"),
    event(7, "evaluate", 10.0, accuracy=0.5, loss=1.25, version=2),
]


def append(run: Path, *events: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in events)


@pytest.fixture
def run(written: Write) -> Path:
    directory = written("a", accuracy=[0.5], status=None, fleet={"devices": 5})
    (directory / "events.jsonl").write_text("")
    append(directory, *EVENTS)
    return directory


def samples(text: str) -> dict[str, float]:
    assert text.endswith("# EOF\n")
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def test_figures_are_those_of_the_log(run: Path) -> None:
    found = samples(FiguresFollower(run).text())
    expected = {
        "freshet_trips_total": 2,
        "freshet_requests_total": 1,
        "freshet_merges_total": 0,
        "freshet_uploads_total": 1,
        "freshet_upload_bytes_total": 1000,
        "freshet_aggregations_total": 1,
        "freshet_lost_total": 1,
        "freshet_rejected_total": 0,
        'freshet_devices{state="training"}': 0,
        'freshet_devices{state="idle"}': 1,
        'freshet_devices{state="lost"}': 1,
        'freshet_devices{state="unseen"}': 3,
        "freshet_version": 2,
        "freshet_time_seconds": 10.0,
        "freshet_ended": 0,
        'freshet_staleness_bucket{le="1.0"}': 1,
        'freshet_staleness_bucket{le="2.0"}': 1,
        'freshet_staleness_bucket{le="5.0"}': 2,
        'freshet_staleness_bucket{le="+Inf"}': 2,
        "freshet_staleness_count": 2,
        "freshet_staleness_sum": 4,
        "freshet_test_accuracy": 0.5,
        "freshet_test_loss": 1.25,
        'freshet_run_info{method="fedasmu"}': 1,
    }
    assert {name: found[name] for name in expected} == expected


def test_only_new_and_complete_lines_are_read(run: Path) -> None:
    follower = FiguresFollower(run)
    assert samples(follower.text())["freshet_trips_total"] == 2
    append(run, event(8, "trigger", 11.0, device=0, trip=2, version=2, epochs=5))
    with (run / "events.jsonl").open("a") as file:
        file.write('{"seq": 9, "kind": "trig')
    assert samples(follower.text())["freshet_trips_total"] == 3
    with (run / "events.jsonl").open("a") as file:
        file.write('ger", "time": 12.0, "device": 2}\n')
    found = samples(follower.text())
    assert found["freshet_trips_total"] == 4 and found['freshet_devices{state="training"}'] == 2


@pytest.mark.parametrize("padding", ["", "longer than before"])
def test_log_that_a_resumed_run_cut_back_is_counted_anew(run: Path, padding: str) -> None:
    follower = FiguresFollower(run)
    follower.text()
    append(run, event(8, "trigger", 11.0, device=0, trip=2, version=2, epochs=5))
    follower.text()
    (run / "events.jsonl").write_text("")
    append(run, *EVENTS[:2], *([] if not padding else [event(n, "noted", 1.0, text=padding) for n in range(3, 40)]))
    found = samples(follower.text())
    assert found["freshet_trips_total"] == 2 and found["freshet_uploads_total"] == 0


def test_damaged_events_are_not_fatal(run: Path) -> None:
    follower = FiguresFollower(run)
    append(
        run, event(8, "trigger", 11.0, device="x"), event(9, "aggregate", None, contributions=7), event(10, "odd", 1)
    )
    found = samples(follower.text())
    assert found["freshet_trips_total"] == 3 and found["freshet_aggregations_total"] == 2


def test_method_name_is_escaped(written: Write) -> None:
    directory = written("b", accuracy=[0.5], method='a"\\b\nc')
    assert r'method="a\"\\b\nc"' in FiguresFollower(directory).text()


def test_ended_run_says_so(written: Write) -> None:
    assert samples(FiguresFollower(written("b", accuracy=[0.5])).text())["freshet_ended"] == 1


def test_format_is_what_a_scraper_reads(run: Path) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(FiguresFollower(run).text())}
    assert families["freshet_uploads"].type == "counter" and families["freshet_staleness"].type == "histogram"
    assert families["freshet_devices"].samples[0].labels == {"state": "training"}


def test_endpoint_answers_this_machine_only(run: Path) -> None:
    with serving(MetricsServer(run)) as server:
        assert server.server_address[0] == "127.0.0.1"

        def get(path: str, host: str | None = None) -> tuple[int, bytes, str | None]:
            connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
            answer = connection.getresponse()
            found = answer.status, answer.read(), answer.getheader("Content-Type")
            connection.close()
            return found

        status, body, kind = get("/metrics")
        assert (status, kind) == (200, KIND) and b"freshet_uploads_total 1" in body
        assert get("/")[0] == get("/metrics/x")[0] == get("/config.toml")[0] == 404
        assert get("/metrics", "evil.example")[0] == 403
        (run / "config.toml").unlink()
        (run / "events.jsonl").unlink()
        assert get("/metrics")[0] in (200, 503)
