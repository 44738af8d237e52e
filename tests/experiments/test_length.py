"""The length of a run in synchronous rounds: the formula against simulations, and its use."""

from math import comb

import numpy as np
import pytest

from freshet.config import resolve
from freshet.data import load
from freshet.data.catalogue import CATALOGUE
from freshet.errors import ConfigError
from freshet.experiments.grid import (
    UserSettings,
    expand,
    length_note,
    model_bytes,
    parse_entries,
    round_seconds,
    with_length,
)
from freshet.federation import Federation
from freshet.paper.cells import CELLS, METHODS, cell_scenario, cell_settings, cell_tables
from freshet.runs.reader import RunDirectory
from freshet.sim.fleet import Fleet
from freshet.sim.forecast import round_seconds as round_of
from freshet.sim.forecast import trip_seconds


def test_the_expected_slowest_by_hand():
    # of 1, 2, 4 two are drawn: {1,2}, {1,4}, {2,4} with greatest 2, 4, 4
    assert round_of(np.array([4.0, 1.0, 2.0]), 2) == pytest.approx(10 / 3)
    assert round_of(np.array([4.0, 1.0, 2.0]), 1) == pytest.approx(7 / 3)
    assert round_of(np.array([4.0, 1.0, 2.0]), 3) == 4.0


@pytest.mark.parametrize(("devices", "count"), [(5, 2), (100, 10), (250, 10), (30, 30)])
def test_the_expected_slowest_against_monte_carlo(devices, count):
    rng = np.random.default_rng(7)
    seconds = rng.gamma(2.0, 10.0, devices)
    draws = np.array([seconds[rng.permutation(devices)[:count]].max() for _ in range(20_000)])
    error = draws.std() / np.sqrt(len(draws))
    assert round_of(seconds, count) == pytest.approx(draws.mean(), abs=4 * error + 1e-9)


def test_a_round_against_monte_carlo_over_fleets_and_draws():
    config = resolve(
        {"fleet": {"devices": 20, "ratio": 5.0, "link_ratio": 3.0, "up_mbps": 0.2}, "run": {"per_round": 4}}
    )
    rng, size = np.random.default_rng(3), model_bytes(config)
    slowest = []
    for seed in range(1000, 1400):
        seconds = trip_seconds(Fleet.draw(config.fleet, seed), size)
        slowest.append(np.mean([seconds[rng.permutation(20)[:4]].max() for _ in range(20)]))
    error = np.sqrt(2) * np.std(slowest) / np.sqrt(len(slowest))  # of two independent samples of fleets
    assert round_seconds(config) == pytest.approx(np.mean(slowest), abs=3 * error)
    assert 3 * error < 0.02 * np.mean(slowest)


def test_for_equal_links_it_is_close_to_the_formula_of_uniform_speeds():
    config = resolve({"fleet": {"devices": 100, "ratio": 5.0}, "run": {"per_round": 10}})
    size = model_bytes(config)
    links = 0.1 + 8 * size / 10e6 + 8 * size / 50e6
    assert round_seconds(config) == pytest.approx(10 * (1 + 4 * 10 / 11) + links, rel=0.005)


def test_rank_k_is_the_slowest_with_the_ratio_of_binomials_as_probability():
    for devices, count in ((3, 2), (10, 10), (12, 1), (100, 10)):
        chances = [comb(k - 1, count - 1) / comb(devices, count) for k in range(1, devices + 1)]
        seconds = np.sort(np.random.default_rng(devices).gamma(2.0, 10.0, devices))
        assert round_of(seconds, count) == pytest.approx(float(seconds @ np.array(chances)), rel=1e-12)


def test_real_rounds_of_fedavg_are_as_long_as_their_slowest_trip_and_the_mean_is_the_formula(tmp_path):
    tables = {
        "method": {"name": "fedavg"},
        "model": {"name": "mlp"},
        "fleet": {"devices": 8, "time": "trip", "fastest": 4.0, "ratio": 5.0, "up_mbps": 0.05, "down_mbps": 0.1},
        "data": {"train_samples": 80, "test_samples": 20},
        "training": {"epochs": 1, "batch_size": 20},
        "run": {"per_round": 3, "until": 3000.0, "eval_every": 3000.0, "executor": "serial"},
    }
    config = resolve(tables)
    run = RunDirectory(Federation.from_config(config).run(out=tmp_path / "run").directory)
    seconds = trip_seconds(Fleet.draw(config.fleet, 0), model_bytes(config))
    started, members, lengths = {}, {}, []
    for event in run.events():
        if event["kind"] == "trigger":
            started[event["round"]] = event["time"]
            members.setdefault(event["round"], []).append(event["device"])
        elif event["kind"] == "aggregate":
            lengths.append(event["time"] - started[event["round"]])
            assert lengths[-1] == pytest.approx(max(seconds[device] for device in members[event["round"]]), abs=1e-6)
    assert len(lengths) > 100
    error = np.std(lengths) / np.sqrt(len(lengths))
    assert np.mean(lengths) == pytest.approx(round_of(seconds, 3), abs=4 * error)
    assert len(lengths) * round_of(seconds, 3) == pytest.approx(3000, rel=0.05)


def test_a_networks_own_options_count():
    small, large = (resolve({"model": {"name": "mlp", "hidden": [width]}}) for width in (8, 64))
    assert 0 < model_bytes(small) < model_bytes(large) == model_bytes(resolve({"model": {"name": "mlp"}}))


def test_the_bytes_of_a_network_are_those_that_travel():
    for name in ("digits", "mlp"):
        config = resolve({"model": {"name": name}})
        assert model_bytes(config) == 4 * Federation.from_config(config).assembly.begin().server.context.layout.size
    assert load("digits").sample_shape == CATALOGUE["digits"].shape


# ---- cells


@pytest.mark.parametrize("name", list(CELLS))
def test_a_cell_lasts_500_synchronous_rounds_of_its_fleet_for_every_method(name):
    found = [resolve(cell_tables(CELLS[name], method)) for method in METHODS]
    assert len({(c.run.until, c.run.eval_every) for c in found}) == 1
    config = found[0]
    assert config.run.until == pytest.approx(500 * round_seconds(config), rel=1e-3)
    assert config.run.until == 500 * config.run.eval_every, "one test per synchronous round"


def test_the_length_follows_the_fleet_that_is_set():
    scenario = cell_scenario(CELLS["lenet-fmnist"])

    def until(*settings):
        return expand(parse_entries("fedasmu"), [0], UserSettings(settings=settings), [scenario])[0].config.run.until

    assert until("fleet.ratio=10.0") > 1.8 * until()
    assert until("fleet.fastest=380.0") == pytest.approx(2 * until(), rel=1e-3)
    assert until("fleet.fastest=20.0") < 0.2 * until()
    assert until("run.per_round=30", "run.in_flight=30") > until()
    assert until("run.until=600") == 600.0
    assert until("run.eval_every=10.0") == pytest.approx(until(), rel=1e-3)


def test_a_given_length_has_a_sensible_test_interval():
    tables = cell_settings(CELLS["lenet-fmnist"], "fedavg")
    tables["run"]["until"] = 600.0
    run = with_length(tables, 500)["run"]
    assert (run["until"], run["eval_every"]) == (600.0, 6.0)


def test_a_learning_rate_that_follows_time_counts_the_seconds_of_a_round():
    tables = cell_settings(CELLS["lenet-fmnist"], "fedavg")
    assert with_length(tables, 500)["training"]["schedule_seconds"] == 880.6
    tables["fleet"]["fastest"] = 19.0
    assert with_length(tables, 500)["training"]["schedule_seconds"] == 88.06
    tables["run"] |= {"until": 600.0, "eval_every": 10.0}
    assert with_length(tables, 500)["training"]["schedule_seconds"] == 88.06
    tables["training"]["schedule_seconds"] = 7.0
    assert with_length(tables, 500)["training"]["schedule_seconds"] == 7.0
    del tables["training"]["schedule_seconds"], tables["training"]["schedule_by"]
    assert "schedule_seconds" not in with_length(tables, 500)["training"]


def test_a_wrong_setting_is_refused():
    with pytest.raises(ConfigError, match=r"fleet\.ratio"):
        with_length({"fleet": {"ratio": 0.5}}, 500)


def test_the_length_note():
    note = length_note(resolve(cell_tables(CELLS["lenet-fmnist"], "fedavg")), "lenet-fmnist")
    assert note.startswith("lenet-fmnist: 440,300 s") and "500 synchronous rounds of 880.6 s (10 of 100" in note
