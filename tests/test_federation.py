"""The Python API: bring a model, data, a fleet and a method; get a result. And the question of whether it learns."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from freshet import ConfigError, DataError, Federation, Fleet, FreshetError, Observer
from freshet.data import load
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

RUN = {"per_round": 3, "period": 4.0, "in_flight": 4, "executor": "serial"}


def toy(samples: int = 60, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, samples)
    return (rng.standard_normal((samples, 6)) + y[:, None]).astype(np.float32), y


def net(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


def build(**changes) -> Federation:
    values = {"model": net, "train": toy(), "test": toy(seed=1), "devices": 4, "run": RUN, "fleet": {"fastest": 2.0}}
    return Federation(**(values | changes))


@pytest.mark.parametrize("until", [30, "30s", "0.5m"])
def test_the_end_may_be_given_with_a_unit(tmp_path, until):
    assert build().run(until, out=tmp_path / "a").summary["virtual_time"] == 30.0
    result = build(run=RUN | {"until": until}).run(out=tmp_path / "b")
    assert (result.summary["virtual_time"], result.summary["status"]) == (30.0, "finished")


@pytest.mark.parametrize("until", ["soon", "-3m", "", "0"])
def test_an_end_that_is_no_time_is_one_sentence(tmp_path, until):
    with pytest.raises(ConfigError, match=r"^run\.until: "):
        build().run(until, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("problem", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_a_default_folder_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, problem):
    monkeypatch.chdir(tmp_path)

    def refuse(*_, **__):
        raise problem

    federation = build()
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    said = rf"^run\.out: the folder runs/ cannot be written \({problem.strerror}\); give another with --out or out=$"
    with pytest.raises(ConfigError, match=said):
        federation.run(5)


def test_arrays_a_model_and_a_number_of_devices_are_enough(tmp_path):
    result = build().run(30, out=tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert result.directory == tmp_path / "run"
    assert len(result.time) == len(result.accuracy) == len(result.loss) == 4
    assert result.accuracy[-1] == result.summary["final_accuracy"]
    assert list(result.frame()["time"]) == list(result.time)
    assert result.loss[-1] < result.loss[0]


def test_a_torch_dataset_is_the_same_as_its_arrays(tmp_path):
    as_set = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in (toy(), toy(seed=1))]
    one = build().run(20, out=tmp_path / "arrays")
    two = build(train=as_set[0], test=as_set[1]).run(20, out=tmp_path / "dataset")
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]


def test_the_final_module_predicts_with_the_final_weights(tmp_path):
    result = build().run(30, out=tmp_path / "run")
    module = result.module()
    x, y = toy(seed=1)
    assert not module.training
    with torch.no_grad():
        accuracy = (module(torch.from_numpy(x)).argmax(1).numpy() == y).mean()
    assert accuracy == pytest.approx(result.summary["final_accuracy"])


def test_time_to_a_target_is_the_first_test_that_reaches_it(tmp_path):
    result = build().run(30, out=tmp_path / "run")
    reached = [t for t, a in zip(result.time, result.accuracy, strict=True) if a >= result.accuracy.max()]
    assert result.time_to(float(result.accuracy.max())) == reached[0]
    assert result.time_to(1.01) is None


def test_a_fleet_of_ones_own_is_used_as_it_is(tmp_path):
    fleet = Fleet(np.array([1.0, 2.0, 3.0, 4.0]), np.full(4, 1e6), np.full(4, 1e6))
    federation = build(fleet=fleet, devices=None)
    assert federation.fleet is fleet
    assert federation.config.fleet.devices == 4
    with pytest.raises(ConfigError, match=r"fleet\.devices"):
        build(fleet=fleet, devices=5)


def test_a_section_of_the_model_can_be_given_as_a_dict_like_every_other_section():
    federation = Federation(model={"name": "digits", "norm": "group"}, data={"train_samples": 200})
    assert federation.config.model.norm == "group"
    assert any(isinstance(layer, nn.GroupNorm) for layer in federation.factory().modules())


def test_a_networks_own_options_are_settings_like_any_other(tmp_path):
    def size(**model) -> int:
        return sum(p.numel() for p in Federation(model=model).factory().parameters())

    assert size(name="mlp", hidden=[]) == 650
    assert size(name="mlp", hidden=[16, 8]) == 64 * 16 + 16 + 16 * 8 + 8 + 8 * 10 + 10
    assert size(name="cnn", pool=True) < size(name="cnn")
    result = Federation(model={"name": "mlp", "hidden": [3]}, run={"executor": "serial"}).run(1, out=tmp_path / "run")
    assert RunDirectory(tmp_path / "run").config()["model"]["hidden"] == [3]
    assert len(result.weights) == 64 * 3 + 3 + 3 * 10 + 10


@pytest.mark.parametrize(
    ("model", "key", "allowed"),
    [
        ({"name": "digits", "pool": True}, "model.pool", "it has no options"),
        ({"name": "mlp", "dropout": 0.1}, "model.dropout", "its options are hidden"),
        ({"name": "mlp", "hidden": [0]}, "model.hidden", "at least 1"),
    ],
)
def test_an_option_that_a_network_has_not_is_one_sentence(model, key, allowed):
    with pytest.raises(ConfigError, match=allowed) as caught:
        Federation(model=model)
    assert caught.value.key == key


def settled(method: str | dict, until: float | None, tmp_path, **run) -> dict:
    out = tmp_path / str(len(list(tmp_path.iterdir())))
    build(method=method, run=RUN | run).run(until, out=out)
    return RunDirectory(out).config()["method"]


def test_options_that_follow_from_the_run_are_in_its_configuration(tmp_path):
    """FedSA's first stage is a tenth of the run; ASO-Fed counts delays in trips of the fastest device."""
    by_time = [settled("fedsa", until, tmp_path)["stage1_updates"] for until in (40.0, 200.0)]
    assert 0 < by_time[0] < by_time[1] / 4
    assert settled("fedsa", None, tmp_path, rounds=20)["stage1_updates"] == 0.1 * 20 * 3
    trips = build(method="asofed").fleet
    model = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    fastest = min(
        trips.download_seconds(k, model) + trips.train_seconds[k] + trips.upload_seconds(k, model) for k in range(4)
    )
    assert settled("asofed", 1.0, tmp_path)["delay_unit"] == pytest.approx(fastest, rel=1e-12)


def test_what_was_given_is_not_changed_by_the_run(tmp_path):
    assert settled({"name": "fedsa", "stage1_updates": 0}, 30.0, tmp_path)["stage1_updates"] == 0
    assert settled({"name": "asofed", "delay_unit": 1.0}, 30.0, tmp_path)["delay_unit"] == 1.0


@pytest.mark.parametrize("method", ["fedsa", "asofed"])
def test_a_run_of_its_own_configuration_and_a_resumed_one_are_the_same_bits(tmp_path, method):
    class Stop(Observer):
        def on_progress(self, time: float) -> None:
            if time > 20.0:
                raise KeyboardInterrupt

    whole = build(method=method).run(40, out=tmp_path / "whole")
    given = RunDirectory(whole.directory).config()["method"]
    again = build(method=given).run(40, out=tmp_path / "again")
    run = RUN | {"checkpoint_every": 5.0}
    build(method=method, run=run).run(40, out=tmp_path / "cut", observers=[Stop()])
    assert build(method=method, run=run).resume(tmp_path / "cut").summary["status"] == "finished"
    logs = {(tmp_path / name / "events.jsonl").read_bytes() for name in ("whole", "again", "cut")}
    assert len(logs) == 1
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert audit(RunDirectory(tmp_path / "cut")).problem is None


def test_building_and_running_leaves_the_random_state_of_the_user_alone(tmp_path):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    federation = build()
    assert torch.equal(torch.get_rng_state(), before)
    federation.run(5, out=tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_are_cut_down_for_ones_own_data_too():
    federation = build(data={"train_samples": 30, "test_samples": 20})
    assert (len(federation.dataset.y_train), len(federation.dataset.y_test)) == (30, 20)


# ---- bad input


def with_nan(data):
    x, y = data
    x = x.copy()
    x[3, 2] = np.nan
    return x, y


BAD = {
    "NaN in the training data": {"train": with_nan(toy())},
    "NaN in the test data": {"test": with_nan(toy())},
    "a negative label": {"train": (toy()[0], toy()[1] - 1)},
    "labels that are no integers": {"train": (toy()[0], toy()[1] + 0.5)},
    "more labels than samples": {"train": (toy()[0][:-1], toy()[1])},
    "no test data": {"test": None},
    "no samples": {"train": (np.zeros((0, 6), np.float32), np.zeros(0, np.int64))},
    "more devices than samples": {"devices": 61},
    "no devices": {"devices": 0},
    "an empty shard": {"shards": [np.arange(20), np.arange(20, 40), np.arange(40, 60), np.arange(0)]},
    "a shard too few": {"shards": [np.arange(20), np.arange(20, 40), np.arange(40, 60)]},
    "a shard that names a sample that is not there": {"shards": [np.arange(i, i + 16) for i in (0, 15, 30, 45)]},
    "an unknown method": {"method": "fedwhat"},
    "an unknown network": {"model": "resnet2000"},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_before_anything_is_written(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError)) as caught:
        build(**BAD[case]).run(5)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "model",
    [lambda: net(2), lambda: nn.Flatten(), lambda: nn.Sequential(nn.Linear(5, 3))],
    ids=["fewer outputs than labels", "nothing to train", "another shape of input"],
)
def test_a_model_that_does_not_fit_the_data_is_one_sentence_before_anything_is_written(model, tmp_path):
    with pytest.raises(FreshetError) as caught:
        build(model=model).run(5, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_taken_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"run\.out"):
        build().run(5, out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


# ---- does it learn


def test_fedasmu_learns_the_digits_and_the_bar_is_out_of_reach_without_learning(federate, tmp_path):
    digits = load("digits")
    test = digits.x_test, digits.y_test
    sections = {
        "fleet": {"devices": 12, "fastest": 10.0},
        "training": {"lr": 0.1, "epochs": 5},
        "run": {"per_round": 10, "period": 10.0, "in_flight": 12, "eval_every": 100.0},
        "data": {"train_samples": 0, "test_samples": 0},
    }

    def accuracy(labels: np.ndarray, name: str) -> np.ndarray:
        federation = federate("fedasmu", train=(digits.x_train, labels), test=test, **sections)
        return federation.run(100, out=tmp_path / name).accuracy

    learned = accuracy(digits.y_train, "real")
    guessed = accuracy(np.random.default_rng(0).permutation(digits.y_train), "shuffled")
    bar = 0.5
    assert learned[0] < bar < learned[-1]
    assert guessed[-1] < bar


def test_images_are_kept_once_as_training_wants_them_and_the_users_own_array_is_let_go():
    x, y = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), dtype=np.uint8), np.arange(60) % 4
    flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    federation = build(model=lambda: flat, train=(x, y), test=(x[:20].copy(), y[:20]), data={"partition": "iid"})
    other = federation.with_settings({"training.lr": 0.2})
    assert (federation.dataset.x_train == x).all()
    assert np.shares_memory(federation.dataset.x_train, other.dataset.x_train)
    users = weakref.ref(x)
    del x
    assert users() is None


@pytest.mark.parametrize(
    "section", ["method", "training", "fleet", "data", "run", "links", "defence", "attack", "privacy"]
)
def test_a_section_that_is_no_dict_is_one_sentence(section):
    with pytest.raises(ConfigError, match=rf"^{section}: must be a dict of settings, but \[1\] was given$"):
        Federation(**{section: [1]})


def test_a_function_that_builds_no_network_is_one_sentence():
    with pytest.raises(ConfigError, match=r"^model: must build a torch.nn.Module, but returned int$"):
        Federation(lambda: 3)
