"""Public phone traces as fleets; their pickles are read and never run."""

import json
import math
import pickle

import pytest
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.errors import DataError
from freshet.sim.traces import Row, from_phones, read_trace

CAPACITY = {1: {"computation": 162.0, "communication": 5648.0}, 2: {"computation": 40, "communication": 800.5}}
BEHAVIOUR = {
    7: {"duration": 5, "active": [10, 50], "inactive": [20, 70], "finish_time": 100, "model": "A1"},
    8: {"duration": 5, "active": [0, 30, 35], "inactive": [20, 40, 120], "finish_time": 100, "model": "B2"},
}


def stored(folder, name: str, content, form: str = "pickle"):
    path = folder / name
    path.write_bytes(pickle.dumps(content) if form == "pickle" else json.dumps(content).encode())
    return path


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_capacities_are_training_seconds_and_rates(tmp_path, form):
    trace = from_phones(stored(tmp_path, "capacity", CAPACITY, form))
    assert trace.names == ("1", "2")
    first, second = trace.histories
    assert first.rows == (Row(0.0, pytest.approx(3 * 0.162), pytest.approx(5.648), pytest.approx(5.648), True),)
    assert second.rows[0].seconds_per_sample == pytest.approx(0.12)
    assert first.cycle == math.inf


def test_behaviour_is_when_a_device_is_there(tmp_path):
    trace = from_phones(stored(tmp_path, "c", CAPACITY), stored(tmp_path, "b", BEHAVIOUR))
    times = [[t for t in range(0, 100, 5) if history.available(t + 200)] for history in trace.histories]
    assert times == [[10, 15, 50, 55, 60, 65], [0, 5, 10, 15, *range(30, 100, 5)]]
    assert trace.histories[1].leaves(35.0) == 120.0  # 30..120 reaches into the next cycle, which begins at 0..20


def test_behaviours_are_used_in_turn_and_clients_can_be_fewer(tmp_path):
    capacity = dict.fromkeys(range(5), CAPACITY[1])
    files = stored(tmp_path, "c", capacity), stored(tmp_path, "b", BEHAVIOUR)
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


def test_a_phone_log_is_free_while_it_charges_on_wifi_and_is_not_in_use(tmp_path):
    behaviour = stored(tmp_path, "b", {"0": {"model": "X", "messages": LOG}}, "json")
    history = from_phones(stored(tmp_path, "c", {1: CAPACITY[1]}), behaviour).histories[0]
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
    ("capacity", "says"),
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
def test_bad_capacities_are_one_sentence(tmp_path, capsys, capacity, says):
    with pytest.raises(DataError) as caught:
        from_phones(stored(tmp_path, "c", capacity))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("entry", "says"),
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
def test_bad_behaviours_are_one_sentence(tmp_path, entry, says):
    with pytest.raises(DataError, match="client 3") as caught:
        from_phones(stored(tmp_path, "c", CAPACITY), stored(tmp_path, "b", {3: entry}))
    assert says in str(caught.value)


def test_the_command_writes_a_file_for_fleet_trace(tmp_path):
    files = [str(stored(tmp_path, "c", CAPACITY)), str(stored(tmp_path, "b", BEHAVIOUR))]
    out = tmp_path / "phones.csv"
    done = CliRunner().invoke(app, ["fleet", "convert", *files, "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "2 devices" in done.output
    assert read_trace(out) == from_phones(*files)
