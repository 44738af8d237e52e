"""From a configuration to data, model, fleet and shards; what is wrong with them is said before anything is written."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from types import FrameType

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from freshet import ConfigError, DataError, Federation, Fleet, FleetOptions, Observer, Task
from freshet.assembly import Assembly, Overrides
from freshet.cli.app import app
from freshet.config import resolve
from freshet.core.method import LocalRule
from freshet.data import load
from freshet.data.dataset import from_arrays, own_data
from freshet.flower.device import Device
from freshet.methods import method_names
from freshet.sim.forecast import expected_uploads, trip_seconds
from freshet.training.network import build_module, initial_weights, layout_of

TABLES = {
    "fleet": {"devices": 6},
    "data": {"train_samples": 240, "test_samples": 60},
    "model": {"name": "mlp", "hidden": []},
    "run": {"seed": 5, "per_round": 2},
}


def config(**sections):
    return resolve({name: table | sections.pop(name, {}) for name, table in TABLES.items()} | sections)


def toy(seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((40, 6)).astype(np.float32), np.arange(40) % 3


def net() -> nn.Module:
    return nn.Linear(6, 3)


# ---- what a configuration names


def test_every_part_follows_from_the_configuration():
    parts = Assembly(config()).check()
    assert (len(parts.dataset.y_train), len(parts.dataset.y_test)) == (240, 60)
    assert parts.layout == layout_of(build_module(parts.factory)) and parts.layout.size == 650
    drawn = Fleet.draw(FleetOptions(devices=6), 5)
    sizes = np.array([len(shard) for shard in parts.shards])
    np.testing.assert_allclose(parts.fleet.train_seconds, drawn.train_seconds * sizes / sizes.mean(), rtol=1e-12)
    trip = Assembly(config(fleet={"time": "trip"})).check().fleet
    np.testing.assert_array_equal(trip.train_seconds, drawn.train_seconds)
    assert sorted(np.concatenate(parts.shards)) == list(range(240)) and len(parts.shards) == 6


def test_the_same_configuration_gives_the_same_parts_and_another_seed_others():
    one, same, other = (Assembly(config(run={"seed": seed})).check() for seed in (5, 5, 6))
    for name in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(one.dataset, name), getattr(same.dataset, name))
    assert [list(shard) for shard in one.shards] == [list(shard) for shard in same.shards]
    assert [list(shard) for shard in one.shards] != [list(shard) for shard in other.shards]
    assert list(one.fleet.train_seconds) == list(same.fleet.train_seconds) != list(other.fleet.train_seconds)


def test_validation_is_cut_from_the_training_samples_that_are_used():
    whole = load("digits")
    train, test = ({row.tobytes() for row in x} for x in (whole.x_train, whole.x_test))
    dataset = Assembly(config(data={"validation": 0.25})).check().dataset
    assert (len(dataset.y_train), len(dataset.y_test)) == (180, 60)
    held_out = {row.tobytes() for row in dataset.x_test}
    assert held_out <= train and not held_out & (test - train)


def test_parts_are_not_changed_once_they_are_made():
    parts = Assembly(config()).check()
    with pytest.raises(FrozenInstanceError):
        parts.fleet = Fleet.draw(FleetOptions(devices=6), 0)


# ---- what is given from Python


def test_what_is_given_is_used_as_it_is_and_named_custom():
    dataset, shards = from_arrays("custom", toy(), toy(1)), [np.arange(20), np.arange(20, 40)]
    fleet = Fleet(np.array([1.0, 2.0]), np.full(2, 1e6), np.full(2, 1e6))
    given = Overrides(dataset, net, fleet, shards)
    assert given.tables() == {
        "fleet": {"devices": 2, "custom": True, "time": "trip"},
        "model": {"name": "custom"},
        "data": {"name": "custom", "partition": "custom"},
        "run": {},
        "training": {},
    }
    parts = Assembly(resolve(given.tables()), given).check()
    assert parts.fleet is fleet and parts.factory is net and parts.layout.size == 21
    np.testing.assert_array_equal(parts.dataset.x_train, dataset.x_train)
    assert [list(shard) for shard in parts.shards] == [list(shard) for shard in shards]


def test_nothing_given_says_nothing():
    assert Overrides().tables() == {"fleet": {}, "model": {}, "data": {}, "run": {}, "training": {}}


@pytest.mark.parametrize(
    ("section", "key"), [("data", "name"), ("model", "name"), ("fleet", "custom"), ("data", "partition")]
)
def test_custom_without_what_it_stands_for_is_one_sentence(section: str, key: str):
    value = True if key == "custom" else "custom"
    model = {} if section == "model" else TABLES["model"]
    tables = TABLES | {"model": model} | {section: (model if section == "model" else TABLES[section]) | {key: value}}
    with pytest.raises(ConfigError, match="from Python") as caught:
        Assembly(resolve(tables)).check()
    assert caught.value.key == f"{section}.{key}" and "\n" not in str(caught.value)


def test_data_are_given_as_both_sets_or_none():
    wishes = resolve({}).data
    assert own_data("custom", None, None, None, wishes) is None
    assert len(own_data("custom", toy(), toy(1), None, wishes).y_train) == 40
    with pytest.raises(DataError, match="test data are missing"):
        own_data("custom", toy(), None, None, wishes)
    with pytest.raises(DataError, match="training data are missing"):
        own_data("custom", None, toy(), None, wishes)


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ([np.arange(240)] * 5, r"one per device \(6\), but 5 were given"),
        ([np.arange(240)] * 5 + [np.arange(0)], "device 5 has no samples"),
        ([np.arange(240)] * 5 + [np.array([240])], r"device 5 names a sample outside 0\.\.239"),
        ([np.arange(240)] * 5 + [np.array([-1])], r"device 5 names a sample outside 0\.\.239"),
    ],
)
def test_shards_that_do_not_fit_are_one_sentence(shards, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        Assembly(config(data={"partition": "custom"}), Overrides(shards=shards)).check()
    assert caught.value.key == "shards"


def test_a_fleet_of_another_size_is_one_sentence():
    fleet = Fleet.draw(FleetOptions(devices=5), 0)
    with pytest.raises(ConfigError, match="is 6, but the fleet has 5 devices"):
        Assembly(config(), Overrides(fleet=fleet)).check()


# ---- what a run makes of them


@pytest.mark.parametrize("trigger", ["periodic", "concurrency"])
def test_the_method_knows_its_world(trigger: str):
    asked = config(run={"trigger": trigger, "in_flight": 4, "until": 200.0}, fleet={"up_mbps": 0.002})
    parts = Assembly(asked).check()
    world, worth = parts.begin().context, 4 if trigger == "concurrency" else 2
    assert (world.devices, world.epochs, world.per_round, world.seed) == (6, 5, worth, 5)
    assert list(world.samples) == [len(shard) for shard in parts.shards]
    assert world.expected_uploads == expected_uploads(parts.fleet, asked.trigger(), 4 * 650, 200.0, 0, worth=worth) > 0
    assert world.fastest_seconds == trip_seconds(parts.fleet, 4 * 650).min()


def test_options_that_follow_from_the_run_are_filled_in_and_those_given_stay():
    asked = config(method={"name": "asofed"})
    parts = Assembly(asked).check()
    settled = parts.begin().config
    assert settled.method.delay_unit == parts.begin().context.fastest_seconds
    assert replace(settled, method=asked.method) == asked, "nothing else changes"
    assert parts.begin(settled).config == settled


def test_the_server_starts_with_the_seeds_own_model_as_version_one():
    asked = config(training={"lr": 0.25})
    parts = Assembly(asked).check()
    server = parts.begin().server
    assert server.version == 1 and server.context.layout == parts.layout
    np.testing.assert_array_equal(server.store.get(1), initial_weights(parts.factory, 5))


def test_workers_get_the_data_the_model_and_the_seed():
    asked = config()
    parts = Assembly(asked).check()
    setup = parts.setup()
    assert (setup.factory, setup.training, setup.seed) == (parts.factory, asked.training, 5)


def test_the_method_looks_at_the_model_once(monkeypatch: pytest.MonkeyPatch):
    seen: list[nn.Module] = []
    monkeypatch.setattr(LocalRule, "check", lambda self, module: seen.append(module))
    Assembly(config(method={"name": "fedavg"})).check()
    assert len(seen) == 1 and isinstance(seen[0], nn.Module)


@pytest.mark.parametrize("method", method_names())
def test_a_federation_of_a_configuration_has_that_configuration(method: str):
    asked = config(method={"name": method}, model={"name": "mlp", "hidden": [4]})  # FedRep needs two layers
    assert Federation.from_config(asked).config == asked


# ---- nothing is made twice


def calls_in(action: Callable[[], object]) -> Counter[str]:
    """How often each function of Freshet is called: ``config.resolve``, ``assembly.Assembly.context``."""
    found: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        _, inside, name = frame.f_code.co_filename.rpartition("/freshet/")
        if event == "call" and inside:
            found[f"{name.removesuffix('.py').replace('/', '.')}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def test_one_run_resolves_its_settings_once_and_makes_each_part_once(tmp_path):
    settings = ["data.train_samples=240", "fleet.devices=6", "run.per_round=2", "run.executor=serial"]
    words = ["run", "-m", "fedasmu", "--until", "30", "-q", "-o", str(tmp_path / "run")]
    command = [*words, *(word for setting in settings for word in ("-s", setting))]
    calls = calls_in(lambda: CliRunner().invoke(app, command, catch_exceptions=False))
    assert (tmp_path / "run" / "summary.json").is_file()
    once = ["config.resolve", "data.sources.load", "data.partition.partition", "sim.fleet.Fleet.draw"]
    once += [f"assembly.Assembly.{part}" for part in ("initial", "shards", "fleet", "context", "server", "coordinator")]
    assert {name: calls[name] for name in once} == dict.fromkeys(once, 1)
    assert calls["models.registry.build"] == 2  # the first global model, and the one that trains


def test_runs_of_one_federation_share_its_parts_but_no_server():
    assembly = Assembly(config()).check()
    first, second = assembly.begin(), assembly.begin(config(run={"until": 900.0}))
    assert first.initial is second.initial is assembly.initial and first.fleet is second.fleet
    assert first.server is first.server and first.server is not second.server
    first.server.weights[:] = 7.0  # which a method must not do
    np.testing.assert_array_equal(second.server.weights, assembly.initial.weights)
    assert not (assembly.initial.weights == 7.0).any()
    assert second.context.expected_uploads > first.context.expected_uploads > 0


def test_a_device_makes_its_own_shard_and_no_fleet(tmp_path):
    asked = config()
    calls = calls_in(lambda: Device().setup(asked, {"partition-id": 4}, 2))
    assert calls["assembly.Assembly.shards"] == 1
    assert not {name for name in calls if name.startswith(("sim.fleet", "assembly.Assembly.fleet"))}
    assert not any(calls[f"assembly.Assembly.{part}"] for part in ("initial", "context", "server", "fingerprint"))
    data = Device().setup(asked, {"partition-id": 4}, 2).data
    assert [len(shard) > 0 for shard in data.shards] == [False, False, True, False, False, False]
    np.testing.assert_array_equal(data.shards[2], Assembly(asked).shards[4])


def test_data_are_hashed_once_for_all_runs_of_a_federation(tmp_path):
    federation = Federation.from_config(config(run={"until": 20.0, "executor": "serial"}))
    calls = calls_in(lambda: [federation.run(out=tmp_path / name) for name in ("one", "two")])
    assert calls["assembly.Assembly.fingerprint"] == 1


def test_a_deployment_refuses_a_length_that_never_ends_and_knows_no_speeds():
    with pytest.raises(ConfigError, match=r"run\.eval_every"):
        Assembly(config(run={"until": 1e10, "eval_every": 1.0}), deployed=True).begin()
    context = Assembly(config(), deployed=True).begin().context
    assert (context.expected_uploads, context.fastest_seconds) == (0, 0.0)


class Masked(nn.Module):
    """A causal mask as people write it."""

    def __init__(self, persistent: bool = True, spoil: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        mask = torch.triu(torch.full((6, 6), float("-inf")), diagonal=1)
        self.register_buffer("mask", mask, persistent=persistent)
        if spoil:
            nn.init.constant_(self.linear.bias, float("nan"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_network_that_is_not_finite_from_the_start_is_refused_by_name():
    def federation(**given):
        return Federation(model=lambda: Masked(**given), train=toy(), test=toy(1), devices=4)

    with pytest.raises(ConfigError, match=r"the buffer mask has entries that are not finite.*persistent=False"):
        federation()
    with pytest.raises(ConfigError, match=r"the parameter linear\.bias is not finite"):
        federation(persistent=False, spoil=True)
    federation(persistent=False)


class Listener(Observer):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, message: str) -> None:
        self.messages.append(message)


def notices(**given) -> tuple[str, ...]:
    values = {"model": net, "train": toy(), "test": toy(1), "devices": 2, "method": "fedavg"}
    return Federation(**(values | given)).assembly.notices


def test_shards_that_overlap_are_told():
    count = len(toy()[1])
    apart = [np.arange(10), np.arange(10, count)]
    assert notices(shards=apart) == ()
    assert notices(shards=[np.arange(10), np.arange(7, count)]) == (
        f"the shards overlap: 3 of {count} training samples occur more than once, and every occurrence counts as a "
        "sample",
    )
    assert notices(data={"partition": lambda y, devices, rng: [[0, 1, 1], [2, 3]]})[0].startswith(
        "the shards overlap: one training sample occurs more than once"
    )


@pytest.mark.parametrize("task", [None, Task(torch.nn.functional.cross_entropy), Task(nn.CrossEntropyLoss())])
def test_a_softmax_before_cross_entropy_is_told(task):
    (notice,) = notices(model=lambda: nn.Sequential(net(), nn.Softmax(1)), task=task)
    assert "add up to 1" in notice and "leave the softmax out" in notice
    assert notices(model=lambda: nn.Sequential(net(), nn.LogSoftmax(1)), task=task) == ()  # changes nothing
    assert notices(task=task) == ()


def test_a_float64_model_is_told():
    assert notices(model=lambda: net().double()) == (
        "the model has float64 parameters (weight); it trains and travels in float32",
    )


def test_a_run_tells_its_notices(tmp_path):
    heard = Listener()
    made = Federation(lambda: net().double(), toy(), toy(1), devices=2, method="fedavg", run={"executor": "serial"})
    made.run(2, out=tmp_path / "a", observers=[heard])
    assert any("float64" in message for message in heard.messages)
