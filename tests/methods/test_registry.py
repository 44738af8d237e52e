"""The registry: which classes are methods, their names, and checks of their options against the run."""

from types import ModuleType
from typing import Any

import pytest

from freshet.config import resolve
from freshet.core.about import About
from freshet.core.method import Method
from freshet.errors import ConfigError
from freshet.methods import _collect, builtin_about, class_and_preset, method_names, method_options, registry
from freshet.methods.fedavg import FedAvg


def test_only_classes_with_their_own_header_are_methods() -> None:
    module = ModuleType("somewhere")
    inside: dict[str, Any] = {"__module__": "somewhere"}
    mine = type("Mine", (Method,), {**inside, "about": About("mine", "async", "Mine", "-")})
    module.__dict__.update(
        Mine=mine,
        Part=type("Part", (Method,), dict(inside)),  # forgot it, or is a part of others
        Heir=type("Heir", (mine,), dict(inside)),  # would else take its parent's name
        FedAvg=FedAvg,  # only imported there
    )
    found: dict[str, type[Method]] = {}
    _collect(module, found)
    assert found == {"mine": mine}


def test_every_name_leads_to_one_method() -> None:
    every = [name for method in registry().values() for name in method.about.names]
    assert sorted(every) == method_names() and len(set(every)) == len(every)
    for key, method in registry().items():
        assert key == method.about.name and class_and_preset(key) == (method, {})
        for name, preset in method.about.variants.items():
            assert class_and_preset(name) == (method, dict(preset))
            chosen = method_options(name, {})
            assert all(getattr(chosen, option) == value for option, value in preset.items())


def test_builtin_about_knows_built_in_methods_only() -> None:
    assert builtin_about("fedasmu-da") is registry()["fedasmu"].about
    assert builtin_about(f"{__name__}:Missing") is None and builtin_about("") is None


def test_marks_come_from_the_header() -> None:
    marks = {name: method.marks() for name, method in registry().items() if method.marks()}
    expected = {"asofed": ["-F"], "fedac": ["R"], "fedsa": ["R"], "masfl": ["R"]}
    assert {name: list(found) for name, found in marks.items()} == expected
    assert all(registry()[name].about.marks() == found for name, found in marks.items())


def test_port_refuses_k_above_in_flight() -> None:
    tables = {"fleet": {"devices": 20}, "run": {"in_flight": 6}}
    assert resolve({"method": {"name": "port", "K": 6}, **tables}).method.K == 6
    with pytest.raises(ConfigError, match=r"^method.K: must be at most run.in_flight = 6, but 7 was given$"):
        resolve({"method": {"name": "port", "K": 7}, **tables})
    assert resolve({"method": {"name": "fedbuff", "K": 7}, **tables}).method.K == 7  # its devices are replaced at once


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu", "fedasmu-published"])
def test_slot_number_must_be_one_of_the_epochs(name: str) -> None:
    assert resolve({"method": {"name": name, "slot": 3}, "training": {"epochs": 3}}).method.slot == 3
    with pytest.raises(
        ConfigError, match=r"^method.slot: must be an epoch in 1..3 \(training.epochs\), but 4 was given$"
    ):
        resolve({"method": {"name": name, "slot": 4}, "training": {"epochs": 3}})
