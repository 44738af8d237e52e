"""The grid as plain data: keys follow the bits, settings reach the right methods, comparisons are fair."""

from dataclasses import replace

import pytest

from freshet.config import resolve
from freshet.errors import ConfigError
from freshet.experiments.grid import (
    UserSettings,
    check_fair,
    expand,
    parse_entries,
    parse_seeds,
    run_key,
    seconds_left,
)
from freshet.paper.cells import CELLS, cell_scenario

from .helpers import jobs


def config(**sections):
    return resolve(sections)


def labels(found):
    return list(dict.fromkeys(job.entry.label for job in found))


def only(methods, **given):
    return {job.entry.label: job.config for job in expand(parse_entries(methods), [0], UserSettings(**given))}


# ---- keys


@pytest.mark.parametrize(
    "aside",
    [
        {"executor": "serial"},
        {"executor": "processes", "workers": 7},
        {"checkpoint_every": 5.0},
        {"checkpoint_minutes": 0.0},
        {"device_memory_mb": 9},
        {"target": 0.33},
    ],
)
def test_executor_and_checkpoints_do_not_change_the_key(aside):
    assert run_key(config(run=aside)) == run_key(config())


@pytest.mark.parametrize(
    "tables",
    [
        {"method": {"name": "fedavg"}},
        {"method": {"name": "fedasmu-da"}},
        {"method": {"name": "fedasmu", "epsilon": 0.2}},
        {"training": {"lr": 0.05}},
        {"training": {"epochs": 4}},
        {"fleet": {"ratio": 6.0}},
        {"fleet": {"loss": 0.1}},
        {"data": {"concentration": 0.4}},
        {"data": {"validation": 0.2}},
        {"data": {"train_samples": 500}},
        {"model": {"name": "mlp"}},
        {"model": {"head": True}},
        {"run": {"seed": 1}},
        {"run": {"until": 301.0}},
        {"run": {"eval_every": 5.0}},
        {"run": {"trigger": "concurrency"}},
        {"run": {"in_flight": 20}},
    ],
)
def test_everything_else_changes_the_key(tables):
    assert run_key(resolve(tables)) != run_key(config())


def test_a_key_can_be_read_and_is_a_file_name():
    assert run_key(config(method={"name": "fedasmu"}, run={"seed": 3})).startswith("fedasmu-seed3-")
    assert "/" not in run_key(replace(config(), method_name="my/module:Class"))


def test_a_written_default_does_not_change_the_key():
    assert run_key(config(training={"epochs": 5}, fleet={"ratio": 5})) == run_key(config())


# ---- entries and seeds


def test_methods_are_separated_by_commas_and_may_have_options_of_their_own():
    found = parse_entries(" fedasmu, fedasmu@slot=h1@epsilon=0 ,fedavg")
    assert [entry.label for entry in found] == ["fedasmu", "fedasmu@slot=h1@epsilon=0", "fedavg"]
    assert dict(found[1].options) == {"slot": "h1", "epsilon": 0}


@pytest.mark.parametrize("text", ["", " , ", "fedavg,fedavg", "nonsense", "fedavg@x"])
def test_wrong_methods_are_refused(text):
    with pytest.raises(ConfigError):
        parse_entries(text)


def test_a_reconstructed_method_is_marked():
    titles = {entry.label: entry.title for entry in parse_entries("fedsa,fedavg,fedsa@a=1.0")}
    assert titles == {"fedsa": "fedsa [R]", "fedavg": "fedavg", "fedsa@a=1.0": "fedsa@a=1.0 [R]"}


def test_seeds_are_a_number_or_a_list():
    assert parse_seeds("3") == [0, 1, 2]
    assert parse_seeds("4,7") == [4, 7]
    for wrong in ("0", "-1", "x", "3,3", "1,-2", ""):
        with pytest.raises(ConfigError):
            parse_seeds(wrong)


# ---- expanding the grid


def test_the_grid_is_worlds_times_seeds_times_methods():
    found = jobs("fedasmu,fedavg,fedsa", (0, 1))
    assert [(job.seed, job.entry.label) for job in found] == [
        (seed, method) for seed in (0, 1) for method in ("fedasmu", "fedavg", "fedsa")
    ]
    assert len({job.key for job in found}) == 6


def test_all_methods_share_data_network_devices_and_the_kind_of_trigger():
    found = only("fedasmu,fedbuff,fedavg,moon", settings=["run.trigger=concurrency", "model.head=true"])
    assert {name: c.run.trigger for name, c in found.items()} == {
        "fedasmu": "concurrency",
        "fedbuff": "concurrency",
        "fedavg": "rounds",
        "moon": "rounds",
    }
    assert all(c.model.head for c in found.values())
    assert len({c.fleet.model_dump_json() for c in found.values()}) == 1


def test_a_config_of_a_synchronous_run_gives_asynchronous_methods_their_usual_trigger():
    tables = resolve({"method": {"name": "fedavg"}}).tables()
    found = only("fedavg,fedasmu", tables=tables)
    assert (found["fedavg"].run.trigger, found["fedasmu"].run.trigger) == ("rounds", "periodic")


def test_an_unfair_grid_is_refused():
    fair = jobs("fedasmu,fedavg", (0,))
    other = jobs("fedavg", (0,), ["data.concentration=0.9"])
    with pytest.raises(ConfigError, match=r"data\.concentration: differs between fedasmu \(0.3\) and fedavg \(0.9\)"):
        check_fair([fair[0], other[0]])
    concurrent = jobs("fedbuff", (0,), ["run.trigger=concurrency"])
    with pytest.raises(ConfigError, match=r"run\.trigger"):
        check_fair([fair[0], concurrent[0]])
    check_fair([fair[0], jobs("fedavg", (0,), ["training.lr=0.01"])[0]])


# ---- settings


def test_a_config_file_brings_its_methods_options_to_that_method_and_its_variants_alone():
    tables = resolve({"method": {"name": "fedasmu", "epsilon": 0.25}, "fleet": {"ratio": 9.0}}).tables()
    found = only("fedasmu,fedasmu-da,fedavg", tables=tables)
    assert (found["fedasmu"].method.epsilon, found["fedasmu-da"].method.epsilon) == (0.25, 0.25)
    assert (found["fedasmu"].method.dynamic_server, found["fedasmu-da"].method.dynamic_server) == (True, False)
    assert all(c.fleet.ratio == 9.0 for c in found.values())


def test_a_config_of_a_variant_does_not_turn_the_method_into_it():
    tables = resolve({"method": {"name": "fedasmu-0"}}).tables()
    assert only("fedasmu", tables=tables)["fedasmu"].method.adaptive_device


def test_settings_reach_all_or_one_method():
    settings = ["training.lr=0.02", "fedasmu.epsilon=0.3", "fedasmu-da.epsilon=0.4", "fedprox.mu=0.5"]
    found = only("fedasmu,fedasmu-da,fedprox", settings=settings)
    assert {c.training.lr for c in found.values()} == {0.02}
    assert (found["fedasmu"].method.epsilon, found["fedasmu-da"].method.epsilon) == (0.3, 0.4)
    assert found["fedprox"].method.mu == 0.5


@pytest.mark.parametrize("setting", ["method.alpha=1", "fedbuff.K=3", "nonsense.x=1"])
def test_a_setting_that_applies_to_nothing_or_to_unnamed_methods_is_refused(setting):
    with pytest.raises(ConfigError, match="--set"):
        only("fedasmu,fedavg", settings=[setting])


def test_tuning_brings_options_and_learning_rate_to_its_method():
    tuned = resolve({"method": {"name": "fedprox", "mu": 0.2}, "training": {"lr": 0.03, "epochs": 9}}).tables()
    found = only("fedavg,fedprox", tuned=[tuned])
    assert (found["fedprox"].training.lr, found["fedprox"].method.mu, found["fedprox"].training.epochs) == (
        0.03,
        0.2,
        5,
    )
    assert found["fedavg"].training.lr == 0.1


def study(name, lr, **options):
    """A study's best.toml; it holds every option, tuned or not."""
    return resolve({"method": {"name": name, **options}, "training": {"lr": lr}}).tables()


@pytest.mark.parametrize("turned", [False, True])
def test_every_variant_has_its_own_study_in_whatever_order_they_are_given(turned):
    studies = [study("fedasmu", 0.01, lambda0=4.0), study("fedasmu-course", 0.02), study("fedasmu-progress", 0.03)]
    found = only("fedasmu,fedasmu-course,fedasmu-progress", tuned=studies[::-1] if turned else studies)
    assert [found[name].training.lr for name in found] == [0.01, 0.02, 0.03]
    assert [found[name].method.lambda0 for name in found] == [4.0, 1.0, 1.0]
    assert [found[name].method.eta_iota for name in found] == [1e-4, 0.005, 1e-4]


def test_a_variant_without_a_study_has_that_of_its_method_and_never_another_variants():
    found = only(
        "fedasmu,fedasmu-da", tuned=[study("fedasmu", 0.01, lambda0=4.0), study("fedasmu-fa", 0.2, lambda0=9.0)]
    )
    assert [(c.training.lr, c.method.lambda0) for c in found.values()] == [(0.01, 4.0), (0.01, 4.0)]
    assert only("fedasmu", tuned=[study("fedasmu-fa", 0.2, lambda0=9.0)])["fedasmu"].method.lambda0 == 10.0


def test_defaults_that_follow_from_what_makes_a_variant_are_not_carried_over():
    found = only(
        "fedasmu-published,fedasmu-progress,fedasmu-course,fedasmu-da", tuned=[study("fedasmu", 0.01, epsilon=0.3)]
    )
    published, progress, course, da = (config.method for config in found.values())
    assert [each.selector for each in (published, progress, course, da)] == ["printed", "shaped", "shaped", "printed"]
    assert [(each.lambda0, each.iota0) for each in (progress, course, da)] == [(1.0, 0.05), (1.0, 0.05), (10.0, 0.0)]
    assert [each.eta_sigma for each in (progress, course, da)] == [1e-4, 0.005, 1e-4]
    assert {each.epsilon for each in (published, progress, course, da)} == {0.3}, "the rest is"


def test_a_config_file_is_handed_to_variants_in_the_same_way():
    tables = study("fedasmu-course", 0.01, lambda0=2.0, gamma0=3.0)
    found = {
        key: config.method for key, config in only("fedasmu,fedasmu-progress,fedasmu-course", tables=tables).items()
    }
    assert [each.gamma0 for each in found.values()] == [3.0, 3.0, 3.0]
    assert [each.lambda0 for each in found.values()] == [10.0, 2.0, 2.0], "progress and course have one scale"
    assert [each.eta_iota for each in found.values()] == [1e-4, 1e-4, 0.005]


def test_a_cell_gives_its_rates_to_the_methods_that_have_them():
    scenario = cell_scenario(CELLS["lenet-cifar10"])
    found = {j.entry.label: j.config for j in expand(parse_entries("fedasmu,fedssmu,fedbuff"), [0], None, [scenario])}
    assert (found["fedasmu"].method.eta_gamma, found["fedssmu"].method.eta_gamma) == (0.1, 0.1)
    assert found["fedbuff"].method.tau_max == -1
    assert all((c.model.name, c.data.name, c.fleet.devices) == ("lenet5", "cifar10", 100) for c in found.values())


# ---- time left


def test_time_left_uses_each_methods_own_pace_and_the_mean_for_the_unknown():
    done = [("a", 100.0, 10.0), ("a", 100.0, 30.0), ("b", 100.0, 5.0)]
    assert seconds_left(done, [("a", 50.0)]) == pytest.approx(50 * 40 / 200)
    assert seconds_left(done, [("b", 200.0), ("c", 300.0)]) == pytest.approx(200 * 0.05 + 300 * 45 / 300)
    assert seconds_left(done, []) == 0
    assert seconds_left([], [("a", 1.0)]) is None
