"""Fleets from trace files: what a file says is what the devices do, and what is wrong with it is said by place."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet import ConfigError, Federation
from freshet.runs.reader import RunDirectory
from freshet.sim import traces
from freshet.sim.fleet import Fleet, FleetOptions
from freshet.sim.traces import COLUMNS, History, Row, Trace, read_trace, write_trace

CSV = """device,from,seconds_per_sample,up_mbps,down_mbps,available,cycle
phone,0,0.1,8,16,1,100
phone,30,,4,,,
phone,60,0.2,,,0,
tablet,10,0.5,,,,
"""


@pytest.fixture
def trace(tmp_path) -> Trace:
    (tmp_path / "fleet.csv").write_text(CSV)
    return read_trace(tmp_path / "fleet.csv")


def test_a_row_holds_until_the_next_and_says_only_what_changes(trace):
    phone, tablet = trace.histories
    assert trace.names == ("phone", "tablet")
    assert phone.cycle == 100 and tablet.cycle == math.inf
    assert phone.rows == (Row(0, 0.1, 8, 16, True), Row(30, 0.1, 4, 16, True), Row(60, 0.2, 4, 16, False))
    assert tablet.rows == (Row(10, 0.5, None, None, True),)


def test_json_holds_the_same_rows(tmp_path, trace):
    header, *lines = [line.split(",") for line in CSV.split()]
    numbers = [{k: v if k == "device" else float(v) for k, v in zip(header, line, strict=True) if v} for line in lines]
    for row in numbers:
        if "available" in row:
            row["available"] = bool(row["available"])
    (tmp_path / "fleet.json").write_text(json.dumps(numbers))
    assert read_trace(tmp_path / "fleet.json") == trace


def test_what_is_written_is_read_back(tmp_path, trace):
    write_trace(trace, tmp_path / "again.csv")
    assert read_trace(tmp_path / "again.csv") == trace


def test_a_device_is_there_as_its_rows_say_in_every_cycle(trace):
    phone, tablet = trace.histories
    assert [phone.available(t) for t in (0, 59.9, 60, 99.9, 100, 159, 160)] == [
        True,
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert [phone.leaves(t) for t in (0, 59, 100, 250)] == [60, 60, 160, 260]
    assert [tablet.available(t) for t in (0, 9.9, 10, 1e9)] == [False, False, True, True]
    assert tablet.leaves(20) == math.inf


def by_scan(history: History, time: float) -> bool:
    """Availability by looking at every row."""
    on = False
    for row in history.rows:
        if row.start <= math.fmod(time, history.cycle):
            on = row.available
    return on


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.0, 99.0), min_size=1, max_size=6, unique=True).map(sorted),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.sampled_from([math.inf, 100.0, 99.7, 123.456]),
    st.floats(0, 1e5),
)
def test_a_device_stays_until_it_leaves_and_is_away_right_then(starts, on, cycle, time):
    gaps = np.diff([*starts, cycle if cycle < math.inf else 200.0])
    if (gaps < 1e-6).any() or 0 < starts[0] < 1e-6:
        return
    history = History(tuple(Row(s, 1.0, None, None, a) for s, a in zip(starts, on, strict=False)), cycle)
    assert history.available(time) == by_scan(history, time)
    leaves = history.leaves(time)
    assert leaves > time
    if history.available(time):
        end = leaves if leaves < math.inf else time + 1000.0
        assert all(history.available(t) for t in np.linspace(time, end, 50)[:-1] if t < end - 1e-6)
        assert leaves == math.inf or not history.available(leaves)


def test_seconds_follow_samples_times_epochs_and_change_with_time(tmp_path):
    (tmp_path / "fleet.csv").write_text(CSV)
    options = FleetOptions(devices=2, trace=str(tmp_path / "fleet.csv"), up_mbps=1.0, down_mbps=2.0, up_latency=0.0)
    fleet = Fleet.draw(options, 0, work=np.array([50.0, 8.0]))
    np.testing.assert_allclose(fleet.train_seconds, [5.0, 4.0])
    np.testing.assert_allclose(fleet.seconds_per_sample, [0.1, 0.5])
    assert [fleet.epoch(0, 5, t) for t in (0, 30, 60, 100)] == pytest.approx([1.0, 1.0, 2.0, 1.0])
    assert [fleet.up(0, 10**6, t) for t in (0, 30, 130)] == pytest.approx([1.0, 2.0, 2.0])
    assert fleet.up(1, 10**6) == pytest.approx(8.0)  # a rate that the file leaves out is the fleet's
    assert fleet.down(1, 10**6) == pytest.approx(0.05 + 4.0)
    assert [fleet.available(0, 61), fleet.leaves(0, 5)] == [False, 60]
    with pytest.raises(ConfigError, match="no samples are known"):
        Fleet.draw(options, 0)


def many(tmp_path, count: int) -> str:
    path = tmp_path / f"{count}.csv"
    path.write_text("device,seconds_per_sample\n" + "".join(f"d{k},{k + 1}\n" for k in range(count)))
    return str(path)


def test_fewer_devices_than_the_trace_has_are_drawn_from_it(tmp_path):
    options = FleetOptions(devices=6, trace=many(tmp_path, 50))
    one, again, other = (Fleet.draw(options, seed, np.ones(6)).train_seconds.tolist() for seed in (0, 0, 1))
    assert one == again != other
    assert one == sorted(set(one)) and set(one) <= set(range(1, 51))
    with pytest.raises(ConfigError, match=r"fleet\.devices: is 51, but the trace has 50 devices"):
        Fleet.draw(FleetOptions(devices=51, trace=many(tmp_path, 50)), 0, np.ones(51))


GOOD = "device,from,seconds_per_sample,up_mbps,down_mbps,available,cycle\na,0,1,1,1,1,\n"
BAD = {
    "no such file": (None, "does not exist"),
    "empty": ("", "lacks the column device"),
    "no rows": ("device,seconds_per_sample\n", "has no devices"),
    "an unknown column": ("device,seconds_per_sample,speed\na,1,1\n", "unknown column 'speed'"),
    "a column twice": ("device,device,seconds_per_sample\na,a,1\n", "a column twice"),
    "no seconds": ("device,from\na,0\n", "line 1 lacks the column seconds_per_sample"),
    "a cell too many": ("device,seconds_per_sample\na,1,2\n", "line 2 has 3 cells, but there are 2 columns"),
    "a first row without seconds": (GOOD + "b,0,,1,1,1,\n", "line 3, column seconds_per_sample: the first row"),
    "NaN": (GOOD + "b,0,nan,1,1,1,\n", "line 3, column seconds_per_sample: must be a number above 0"),
    "infinity": (GOOD + "b,0,1,inf,1,1,\n", "line 3, column up_mbps"),
    "zero": (GOOD + "b,0,0,1,1,1,\n", "line 3, column seconds_per_sample"),
    "negative": (GOOD + "b,0,1,1,-5,1,\n", "line 3, column down_mbps: must be a number above 0"),
    "a text": (GOOD + "b,soon,1,1,1,1,\n", "line 3, column from: must be a number in 0..1e+12, but 'soon'"),
    "far too large": (GOOD + "b,1e300,1,1,1,1,\n", "line 3, column from"),
    "times in another order": (GOOD + "a,5,1,1,1,1,\na,5,1,1,1,1,\n", "line 4, column from: 5 is not after 5"),
    "a row beyond the cycle": (GOOD + "b,0,1,1,1,1,10\nb,10,1,1,1,0,\n", "line 4, column from: 10 is not before"),
    "two cycles": (GOOD + "b,0,1,1,1,1,10\nb,5,1,1,1,0,20\n", "line 4, column cycle"),
    "a strange availability": (GOOD + "b,0,1,1,1,maybe,\n", "line 3, column available: must be 1 or 0, but 'maybe'"),
    "no name": (GOOD + ",0,1,1,1,1,\n", "line 3, column device"),
    "a quote that never ends": (GOOD + '"' + "x" * 200_000, "cannot be read"),
    "bytes that are no text": (b"\xff\xfe\x00", "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_csv_file_is_one_sentence_with_the_place(tmp_path, case):
    content, says = BAD[case]
    path = tmp_path / "bad.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert caught.value.key == "fleet.trace"
    assert says in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "must hold a list of rows"),
        ("[1]", "row 1 must be an object"),
        ('[{"device": "a", "speed": 1}]', "row 1 has the unknown key 'speed'"),
        ('[{"device": "a", "seconds_per_sample": NaN}]', "row 1, column seconds_per_sample"),
        ('[{"device": "a", "seconds_per_sample": true}]', "row 1, column seconds_per_sample"),
        ('[{"device": "a", "seconds_per_sample": [1]}]', "row 1, column seconds_per_sample"),
        ('[{"device": null, "seconds_per_sample": 1}]', "row 1, column device"),
        ('[{"device": "a", "seconds_per_sample": 1' + "0" * 400 + "}]", "row 1, column seconds_per_sample"),
        ('[{"device": "a", "seconds_per_sample": 1' + "0" * 5000 + "}]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('[{"device"', "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_json_file_is_one_sentence_with_the_place(tmp_path, content, says):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_trace(tmp_path / "bad.json")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_are_bounded(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"must be a \.csv or a \.json file"):
        read_trace(tmp_path / "fleet.pkl")
    monkeypatch.setattr(traces, "MOST_ROWS", 3)
    with pytest.raises(ConfigError, match="more than 3 rows"):
        read_trace(many(tmp_path, 4))
    monkeypatch.setattr(traces, "LARGEST_FILE", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        read_trace(many(tmp_path, 3))


def test_a_changed_file_is_read_again(tmp_path):
    assert len(read_trace(many(tmp_path, 3))) == 3
    (tmp_path / "3.csv").write_text("device,seconds_per_sample\na,1\n")
    assert len(read_trace(tmp_path / "3.csv")) == 1


def test_the_docs_name_every_column():
    text = (Path(__file__).parents[1] / "docs" / "fleets.md").read_text()
    assert all(f"| `{column}` |" in text for column in COLUMNS)


def test_the_example_in_the_docs_is_what_the_docs_say(tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "fleets.md").read_text()
    (tmp_path / "docs.csv").write_text(text.split("```csv\n")[1].split("```")[0])
    pixel, tablet = read_trace(tmp_path / "docs.csv").histories
    hours = [hour for hour in range(72) if pixel.available(3600.0 * hour)]
    assert hours == [22, 23, 46, 47, 70, 71]
    assert tablet.figures(3600).seconds_per_sample == 3 * tablet.figures(3599).seconds_per_sample


def test_a_run_follows_the_trace(tmp_path, federate):
    """A device of 30 samples and 4 epochs takes 0.01 s per sample, ten times as long from 100 s on, and is away between
    40 s and 60 s."""
    rows = ["device,from,seconds_per_sample,up_mbps,down_mbps,available"]
    for device in range(8):
        rows += [f"{device},0,0.01,8,8,1", f"{device},40,,,,0", f"{device},60,,,,1", f"{device},100,0.1,,,"]
    path = tmp_path / "fleet.csv"
    path.write_text("\n".join(rows))
    fleet = {"trace": str(path), "up_latency": 0.0, "down_latency": 0.0}
    result = federate("fedavg", fleet=fleet, data={"partition": "iid"}).run(140, out=tmp_path / "run")
    events = list(RunDirectory(result.directory).events())
    began = {(e["device"], e["trip"]): e["time"] for e in events if e["kind"] == "trigger"}
    legs = 2 * (4 * (64 * 10 + 10)) / 1e6
    took = {(began[e["device"], e["trip"]], e["time"]) for e in events if e["kind"] == "upload"}
    early = [end - start for start, end in took if end < 100]
    late = [end - start for start, end in took if start > 100]
    assert early and late
    np.testing.assert_allclose(early, 30 * 4 * 0.01 + legs, rtol=1e-9)
    np.testing.assert_allclose(late, 30 * 4 * 0.1 + legs, rtol=1e-9)
    assert not any(40 <= time < 60 for time in began.values())
    assert {e["reason"] for e in events if e["kind"] == "lost"} <= {"device left"}


def test_a_trace_sets_the_number_of_devices(tmp_path):
    federation = Federation(fleet={"trace": many(tmp_path, 7)}, run={"executor": "serial"})
    assert len(federation.fleet) == federation.config.fleet.devices == federation.config.run.per_round == 7
    samples = np.array([len(shard) for shard in federation.shards])
    np.testing.assert_allclose(federation.fleet.train_seconds, np.arange(1, 8) * samples * 5)
