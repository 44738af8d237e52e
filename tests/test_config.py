"""Configuration: every value checked, defaults filled in, one sentence for a mistake."""

import math
import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.config import load_tables, override, resolve, seconds
from freshet.errors import ConfigError

BAD = [
    ({"fleet": {"devices": 0}}, "fleet.devices", "1"),
    ({"fleet": {"devices": -3}}, "fleet.devices", "1"),
    ({"fleet": {"devices": 2.5}}, "fleet.devices", "integer"),
    ({"fleet": {"devices": "ten"}}, "fleet.devices", "integer"),
    ({"fleet": {"devices": True}}, "fleet.devices", "integer"),
    ({"fleet": {"ratio": 0.5}}, "fleet.ratio", "1"),
    ({"fleet": {"ratio": float("nan")}}, "fleet.ratio", "finite"),
    ({"fleet": {"ratoi": 5}}, "fleet.ratoi", "fleet.ratio"),
    ({"fleet": {"loss": 1.0}}, "fleet.loss", "less than 1"),
    ({"fleet": {"on_seconds": 5.0}}, "on_seconds", "both"),
    ({"fleet": {"devices": 5}, "run": {"per_round": 6}}, "run.per_round", "fleet.devices = 5"),
    ({"fleet": {"devices": 5}, "run": {"in_flight": 6}}, "run.in_flight", "fleet.devices = 5"),
    ({"run": {"per_round": 0}}, "run.per_round", "1"),
    ({"run": {"until": 0}}, "run.until", "greater than 0"),
    ({"run": {"until": float("inf")}}, "run.until", "finite"),
    ({"run": {"until": -1.0, "rounds": 3}}, "run.until", "0"),
    ({"run": {"until": 0, "rounds": 0}}, "run.until", "run.rounds"),
    ({"run": {"rounds": -1}}, "run.rounds", "0"),
    ({"run": {"rounds": "ten"}}, "run.rounds", "integer"),
    ({"run": {"diverged": "ignore"}}, "run.diverged", "continue"),
    ({"run": {"seed": -1}}, "run.seed", "0"),
    ({"run": {"trigger": "sometimes"}}, "run.trigger", "periodic"),
    ({"run": {"trigger": "rounds"}}, "run.trigger", "periodic"),
    ({"method": {"name": "fedavg"}, "run": {"trigger": "periodic"}}, "run.trigger", "rounds"),
    ({"method": {"name": "fedsomething"}}, "method.name", "fedasmu"),
    ({"method": {"name": 3}}, "method.name", "string"),
    ({"method": {"name": "no_such_module:Thing"}}, "method.name", "imported"),
    ({"method": {"name": "json:JSONDecoder"}}, "method.name", "subclass"),
    ({"method": {"slot": 0}}, "method.slot", "1..5"),
    ({"method": {"slot": 6}}, "method.slot", "1..5"),
    ({"method": {"slot": 4}, "training": {"epochs": 3}}, "method.slot", "1..3"),
    ({"method": {"slot": "h4"}}, "method.slot", "h1"),
    ({"method": {"tau_max": 0}}, "method.tau_max", "1"),
    ({"method": {"epsilon": 1.5}}, "method.epsilon", "1"),
    ({"method": {"equations": "mine"}}, "method.equations", "published"),
    ({"method": {"dynamic_server": "yes"}}, "method.dynamic_server", "boolean"),
    ({"method": {"lamda0": 1.0}}, "method.lamda0", "method.lambda0"),
    ({"method": {"name": "fedavg", "lambda0": 1.0}}, "method.lambda0", "known"),
    ({"training": {"epochs": 0}}, "training.epochs", "1"),
    ({"training": {"lr": 0}}, "training.lr", "greater than 0"),
    ({"training": {"momentum": 1.0}}, "training.momentum", "less than 1"),
    ({"data": {"partition": "fair"}}, "data.partition", "dirichlet"),
    ({"data": {"concentration": 0}}, "data.concentration", "greater than 0"),
    ({"model": {"norm": "layer"}}, "model.norm", "batch"),
    ({"model": {"pool": 1}}, "model.pool", "boolean"),
    ({"model": {"hidden": [64, "many"]}}, "model.hidden", "integer"),
    ({"model": {"poll": True}}, "model.poll", "model.pool"),
    ({"model": {"name": "custom", "dropout": 0.1}}, "model.dropout", "built-in"),
    ({"flet": {}}, "flet", "fleet"),
    ({"fleet": 5}, "fleet", "table"),
    ({"method": "fedavg"}, "method", "table"),
]


@pytest.mark.parametrize(("tables", "key", "allowed"), BAD)
def test_a_mistake_is_one_sentence_that_names_the_key_and_what_is_allowed(tables, key, allowed):
    with pytest.raises(ConfigError) as caught:
        resolve(tables)
    text = str(caught.value)
    assert key in text.split(" ", 1)[0] or key in text
    assert allowed in text
    assert "\n" not in text


def test_nothing_given_is_the_embedded_digits_with_forty_devices():
    config = resolve({})
    assert (config.method_name, config.data.name, config.model.name) == ("fedasmu", "digits", "digits")
    assert (config.fleet.devices, config.fleet.ratio, config.data.concentration) == (40, 5.0, 0.3)
    assert config.run.trigger == "periodic"


def test_few_devices_bring_the_numbers_that_depend_on_them_down():
    run = resolve({"fleet": {"devices": 4}}).run
    assert (run.per_round, run.in_flight) == (4, 4)
    run = resolve({"fleet": {"devices": 100}, "run": {"per_round": 20}}).run
    assert (run.per_round, run.in_flight) == (20, 60)


@pytest.mark.parametrize(
    ("given", "until", "rounds", "end"),
    [
        ({}, 300.0, 0, 300.0),
        ({"until": 50.0}, 50.0, 0, 50.0),
        ({"rounds": 7}, 0.0, 7, math.inf),
        ({"rounds": 7, "until": 50.0}, 50.0, 7, 50.0),
        ({"rounds": 0}, 300.0, 0, 300.0),
    ],
)
def test_a_run_that_ends_by_rounds_has_no_end_in_time_unless_one_is_given(given, until, rounds, end):
    run = resolve({"run": given}).run
    assert (run.until, run.rounds, run.end) == (until, rounds, end)
    assert resolve(tomllib.loads(tomli_w.dumps(resolve({"run": given}).tables()))).run == run


@pytest.mark.parametrize("method", ["fedsa", "asofed"])
def test_what_follows_from_elsewhere_is_left_out_of_the_tables_and_comes_back(method):
    config = resolve({"method": {"name": method}, "model": {"name": "mlp", "hidden": []}})
    tables = config.tables()
    assert None not in [value for table in tables.values() for value in table.values()]
    assert tables["model"] == {"name": "mlp", "norm": "", "head": False, "start": "", "hidden": []}
    assert resolve(tomllib.loads(tomli_w.dumps(tables))) == config


@pytest.mark.parametrize(
    ("method", "trigger"),
    [("fedasmu", "periodic"), ("fedssmu", "rounds"), ("fedavg", "rounds"), ("fedasmu-0", "periodic")],
)
def test_the_trigger_follows_the_kind_of_method(method, trigger):
    assert resolve({"method": {"name": method}}).run.trigger == trigger


@pytest.mark.parametrize(
    ("name", "server", "device"),
    [("fedasmu", True, True), ("fedasmu-da", False, True), ("fedasmu-fa", True, False), ("fedasmu-0", False, False)],
)
def test_variants_are_presets_of_the_two_switches(name, server, device):
    method = resolve({"method": {"name": name}}).method
    assert (method.dynamic_server, method.adaptive_device) == (server, device)


@pytest.mark.parametrize("method", ["fedasmu", "fedasmu-da", "fedssmu", "fedavg"])
def test_a_resolved_configuration_resolves_to_itself(method):
    config = resolve({"method": {"name": method}, "run": {"seed": 3}})
    again = resolve(tomllib.loads(tomli_w.dumps(config.tables())))
    assert again == config


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(Exception, match="frozen"):
        resolve({}).run.seed = 5


# ---- --set


def settings_after(*assignments: str) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    override(tables, assignments)
    return tables


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 2.5", 2.5),
        ("a.b=true", True),
        ("a.b=h1", "h1"),
        ('a.b="3"', "3"),
        ("a.b=1e-3", 0.001),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
    ],
)
def test_a_value_is_read_as_toml_and_else_as_text(assignment, value):
    read = settings_after(assignment)["a"]["b"]
    assert (read, type(read)) == (value, type(value))


def test_the_last_assignment_wins():
    assert settings_after("run.seed=1", "run.until=5", "run.seed=2") == {"run": {"seed": 2, "until": 5}}


@pytest.mark.parametrize("text", ["run.seed", "seed=3", ".seed=3", "run.=3", "=3", ""])
def test_an_assignment_without_its_parts_is_refused(text):
    with pytest.raises(ConfigError, match="--set") as caught:
        settings_after(text)
    assert "section.key=value" in str(caught.value)


# ---- --until


@pytest.mark.parametrize(
    ("text", "value"),
    [("600", 600.0), ("600s", 600.0), ("10m", 600.0), ("2h", 7200.0), ("0.5m", 30.0), ("1e3", 1000.0)],
)
def test_times_may_have_a_unit(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "m", "soon", "-5", "0", "inf", "nan", "1e400", "5d", "5mm"])
def test_a_time_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"run\.until"):
        seconds(text)


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-3, 1e12))
def test_seconds_are_read_exactly(value):
    assert seconds(repr(value)) == value


# ---- --config


def test_a_file_that_is_missing_or_no_toml_is_a_sentence(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\nseed = ")
    noise = tmp_path / "noise.toml"
    noise.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing.toml", bad, noise, tmp_path):
        with pytest.raises(ConfigError, match="--config") as caught:
            load_tables(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
