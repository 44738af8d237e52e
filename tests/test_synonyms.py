"""Names of other systems lead to the names here."""

from typing import Any

import pytest

from freshet import Federation
from freshet.config import SECTIONS, override, resolve
from freshet.core.method import SYNONYMS
from freshet.errors import ConfigError


def test_what_is_meant_exists() -> None:
    for meant in SYNONYMS.values():
        section, _, key = meant.partition(".")
        assert meant == "method.name" or key in SECTIONS[section].model_fields


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 10}, "clients: is not an argument of Federation; did you mean devices?"),
        ({"alpha": 0.5}, 'alpha: is not an argument of Federation; did you mean data={"concentration": ...}?'),
        ({"num_rounds": 5}, 'num_rounds: is not an argument of Federation; did you mean run={"rounds": ...}?'),
        ({"strategy": "fedavg"}, 'strategy: is not an argument of Federation; did you mean method={"name": ...}?'),
        ({"concentration": 0.5}, 'concentration: is not an argument of Federation; write data={"concentration": ...}'),
        ({"lr": 0.5}, 'lr: is not an argument of Federation; write training={"lr": ...}'),
        ({"devises": 5}, "devises: is not an argument of Federation; did you mean devices?"),
    ],
)
def test_an_unknown_argument_says_what_may_be_meant(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Federation(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("fleet", "clients", "fleet.devices"),
        ("data", "alpha", "data.concentration"),
        ("data", "clients", "fleet.devices"),
        ("training", "learning_rate", "training.lr"),
        ("training", "optimizer", "training.optimiser"),
        ("run", "num_rounds", "run.rounds"),
        ("run", "clients_per_round", "run.per_round"),
    ],
)
def test_an_unknown_setting_says_what_may_be_meant(section: str, key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: is not a known key; did you mean {meant}\?"):
        resolve({section: {key: 1}})


def test_a_setting_without_a_section_says_what_may_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"did you mean fleet\.devices=10\?"):
        override({}, ["clients=10"])
