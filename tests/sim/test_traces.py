"""Fleets from trace files: devices behave as the file says, and an error names its place."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from freshet import ConfigError, Federation
from freshet.cli.app import app
from freshet.errors import DataError
from freshet.runs.reader import RunDirectory
from freshet.sim import traces
from freshet.sim.fleet import Fleet, FleetOptions
from freshet.sim.traces import COLUMNS, History, Row, Trace, from_phones, read_trace, write_trace

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


def test_a_row_holds_until_the_next_and_empty_cells_keep_the_value(trace):
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


def test_a_written_trace_is_read_back(tmp_path, trace):
    write_trace(trace, tmp_path / "again.csv")
    assert read_trace(tmp_path / "again.csv") == trace


def test_availability_repeats_in_every_cycle(trace):
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
    assert [phone.leave_time(t) for t in (0, 59, 100, 250)] == [60, 60, 160, 260]
    assert [tablet.available(t) for t in (0, 9.9, 10, 1e9)] == [False, False, True, True]
    assert tablet.leave_time(20) == math.inf


def available_by_scan(history: History, time: float) -> bool:
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
def test_a_device_is_available_until_its_leave_time_and_away_then(starts, on, cycle, time):
    gaps = np.diff([*starts, cycle if cycle < math.inf else 200.0])
    if (gaps < 1e-6).any() or 0 < starts[0] < 1e-6:
        return
    history = History(tuple(Row(s, 1.0, None, None, a) for s, a in zip(starts, on, strict=False)), cycle)
    assert history.available(time) == available_by_scan(history, time)
    leaves = history.leave_time(time)
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
    assert [fleet.epoch_seconds(0, 5, t) for t in (0, 30, 60, 100)] == pytest.approx([1.0, 1.0, 2.0, 1.0])
    assert [fleet.upload_seconds(0, 10**6, t) for t in (0, 30, 130)] == pytest.approx([1.0, 2.0, 2.0])
    assert fleet.upload_seconds(1, 10**6) == pytest.approx(8.0)  # a rate missing in the file is the fleet's
    assert fleet.download_seconds(1, 10**6) == pytest.approx(0.05 + 4.0)
    assert [fleet.available(0, 61), fleet.leave_time(0, 5)] == [False, 60]
    with pytest.raises(ConfigError, match="no samples are known"):
        Fleet.draw(options, 0)


def many(tmp_path, count: int) -> str:
    path = tmp_path / f"{count}.csv"
    path.write_text("device,seconds_per_sample\n" + "".join(f"d{k},{k + 1}\n" for k in range(count)))
    return str(path)


def test_fewer_devices_than_in_the_trace_are_a_random_sample(tmp_path):
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
    "bytes that are not text": (b"\xff\xfe\x00", "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_in_a_csv_file_is_one_sentence_with_its_place(tmp_path, case):
    content, message = BAD[case]
    path = tmp_path / "bad.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert caught.value.key == "fleet.trace"
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("content", "message"),
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
def test_an_error_in_a_json_file_is_one_sentence_with_its_place(tmp_path, content, message):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_trace(tmp_path / "bad.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_are_bounded(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"must be a \.csv or a \.json file"):
        read_trace(tmp_path / "fleet.pkl")
    monkeypatch.setattr(traces, "MAX_ROWS", 3)
    with pytest.raises(ConfigError, match="more than 3 rows"):
        read_trace(many(tmp_path, 4))
    monkeypatch.setattr(traces, "MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        read_trace(many(tmp_path, 3))


def test_a_changed_file_is_read_again(tmp_path):
    assert len(read_trace(many(tmp_path, 3))) == 3
    (tmp_path / "3.csv").write_text("device,seconds_per_sample\na,1\n")
    assert len(read_trace(tmp_path / "3.csv")) == 1


def test_the_docs_name_every_column():
    text = (Path(__file__).parents[2] / "docs" / "fleets.md").read_text()
    assert all(f"| `{column}` |" in text for column in COLUMNS)


def test_the_example_in_the_docs_behaves_as_described(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "fleets.md").read_text()
    (tmp_path / "docs.csv").write_text(text.split("```csv\n")[1].split("```")[0])
    pixel, tablet = read_trace(tmp_path / "docs.csv").histories
    hours = [hour for hour in range(72) if pixel.available(3600.0 * hour)]
    assert hours == [22, 23, 46, 47, 70, 71]
    assert tablet.figures_at(3600).seconds_per_sample == 3 * tablet.figures_at(3599).seconds_per_sample


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


# ---- availability as pandas writes it: 1.0 and 0.0


@pytest.mark.parametrize("form", ["csv", "json"])
def test_availability_may_be_written_as_a_float(form, tmp_path):
    rows = [{"device": k, "seconds_per_sample": 0.1, "available": here} for k, here in enumerate((1.0, 0.0))]
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path = tmp_path / f"trace.{form}"
    path.write_text(json.dumps(rows) if form == "json" else "\n".join(lines))
    assert [history.available(0) for history in read_trace(path).histories] == [True, False]


@pytest.mark.parametrize("here", ["0.5", "1.00001", "2", "nan"])
def test_other_numbers_are_no_availability(here, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"device,seconds_per_sample,available\n0,0.1,{here}\n")
    with pytest.raises(ConfigError, match="must be 1 or 0"):
        read_trace(path)


# ---- public phone traces; their pickles are read and never executed

CAPACITY = {1: {"computation": 162.0, "communication": 5648.0}, 2: {"computation": 40, "communication": 800.5}}
BEHAVIOUR = {
    7: {"duration": 5, "active": [10, 50], "inactive": [20, 70], "finish_time": 100, "model": "A1"},
    8: {"duration": 5, "active": [0, 30, 35], "inactive": [20, 40, 120], "finish_time": 100, "model": "B2"},
}


def write_file(folder, name: str, content, form: str = "pickle"):
    path = folder / name
    path.write_bytes(pickle.dumps(content) if form == "pickle" else json.dumps(content).encode())
    return path


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_capacities_are_training_seconds_and_rates(tmp_path, form):
    trace = from_phones(write_file(tmp_path, "capacity", CAPACITY, form))
    assert trace.names == ("1", "2")
    first, second = trace.histories
    assert first.rows == (Row(0.0, pytest.approx(3 * 0.162), pytest.approx(5.648), pytest.approx(5.648), True),)
    assert second.rows[0].seconds_per_sample == pytest.approx(0.12)
    assert first.cycle == math.inf


def test_behaviour_gives_the_availability(tmp_path):
    trace = from_phones(write_file(tmp_path, "c", CAPACITY), write_file(tmp_path, "b", BEHAVIOUR))
    times = [[t for t in range(0, 100, 5) if history.available(t + 200)] for history in trace.histories]
    assert times == [[10, 15, 50, 55, 60, 65], [0, 5, 10, 15, *range(30, 100, 5)]]
    assert trace.histories[1].leave_time(35.0) == 120.0  # 30..120 reaches into the next cycle, which begins at 0..20


def test_behaviours_repeat_for_more_clients_and_the_number_of_clients_can_be_limited(tmp_path):
    capacity = dict.fromkeys(range(5), CAPACITY[1])
    files = write_file(tmp_path, "c", capacity), write_file(tmp_path, "b", BEHAVIOUR)
    cycles = [[row.start for row in history.rows] for history in from_phones(*files).histories]
    assert cycles[0] == cycles[2] == cycles[4] != cycles[1] == cycles[3]
    assert len(from_phones(*files, devices=3)) == 3
    with pytest.raises(DataError, match="has 5 clients, but 6 were asked for"):
        from_phones(*files, devices=6)


LOG = """2020-01-31 23:00:00\tbattery_charged_on
2020-01-31 23:10:00\tscreen_off
2020-01-31 23:30:00\tWIFI
2020-02-01 01:00:00\t87.0%
2020-02-01 06:00:00\tscreen_on
2020-02-01 06:05:00\tscreen_lock
2020-02-01 07:00:00\t4G
2020-02-01 08:00:00\twifi
2020-02-01 09:00:00\tphone_off
"""


def test_a_phone_is_available_while_it_charges_on_wifi_and_is_not_in_use(tmp_path):
    behaviour = write_file(tmp_path, "b", {"0": {"model": "X", "messages": LOG}}, "json")
    history = from_phones(write_file(tmp_path, "c", {1: CAPACITY[1]}), behaviour).histories[0]
    minutes = [(round(row.start / 60), row.available) for row in history.rows]
    assert minutes == [
        (0, False),
        (23 * 60 + 30, True),
        (30 * 60, False),
        (30 * 60 + 5, True),
        (31 * 60, False),
        (32 * 60, True),
        (33 * 60, False),
    ]
    assert history.cycle == 2 * 86400


class Trap:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        ({1: Trap()}, "not plain data; it is refused, not run"),
        ([1, 2], "must hold a dict of clients"),
        ({}, "must hold a dict of clients"),
        ({1: {"computation": -1.0, "communication": 1.0}}, "client 1: computation must be a number above 0"),
        ({1: {"computation": float("nan"), "communication": 1.0}}, "client 1: computation"),
        ({1: {"computation": 1.0}}, "client 1: communication must be a number"),
        ({1: {"computation": 1.0, "communication": "fast"}}, "but is 'fast'"),
    ],
)
def test_bad_capacities_are_one_sentence(tmp_path, capsys, capacity, message):
    with pytest.raises(DataError) as caught:
        from_phones(write_file(tmp_path, "c", capacity))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"active": [0], "inactive": [1]}, "finish_time must be a number"),
        ({"active": [0, 2], "inactive": [1], "finish_time": 9}, "equally long"),
        ({"active": [-1], "inactive": [1], "finish_time": 9}, "active must be a list of seconds"),
        ({"active": [0], "inactive": None, "finish_time": 9}, "inactive must be a list of seconds"),
        ({"messages": ["a"]}, "messages must be lines of text"),
        ({"messages": ""}, "messages are empty"),
        ({"messages": "yesterday\twifi"}, "is not a time, a tab and a state"),
        ({"messages": "2020-01-02 10:00:00\twifi\n2020-01-01 10:00:00\t4g"}, "comes after a later time"),
    ],
)
def test_bad_behaviours_are_one_sentence(tmp_path, entry, message):
    with pytest.raises(DataError, match="client 3") as caught:
        from_phones(write_file(tmp_path, "c", CAPACITY), write_file(tmp_path, "b", {3: entry}))
    assert message in str(caught.value)


def test_the_command_writes_a_file_for_fleet_trace(tmp_path):
    files = [str(write_file(tmp_path, "c", CAPACITY)), str(write_file(tmp_path, "b", BEHAVIOUR))]
    out = tmp_path / "phones.csv"
    done = CliRunner().invoke(app, ["fleet", "convert", *files, "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "2 devices" in done.output
    assert read_trace(out) == from_phones(*files)
