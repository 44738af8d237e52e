"""``Federation(trainer=my_train)``: the same run as with the built-in loop, on every executor and after a resume."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freshet import ConfigError, Federation, Observer, RunDirectory
from freshet.compute.processes import WorkerPool
from freshet.flower import wire
from freshet.flower.device import Device
from freshet.result import Result
from freshet.runs.audit import audit
from tests.flower.fakes import FakeFederation

METHODS = ["fedasmu", "fedbuff", "fedavg", {"name": "port", "K": 2, "omega": 1}]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    return x, (x[:, :3]).argmax(1)


def my_train(model: Any, data: Any, trip: Any) -> Any:
    optimiser = torch.optim.SGD(model.parameters(), lr=trip.lr)
    for _ in range(trip.epochs):
        for x, y in data.batches():
            optimiser.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimiser.step()
            trip.step()
    return {"loss": loss.item()}


def wild(model: Any, data: Any, trip: Any) -> Any:
    """Draws from every global generator, leaves traces in the module, and uses two optimisers."""
    optimisers = [torch.optim.Adam(layer.parameters(), lr=0.1 * trip.lr) for layer in (model[0], model[3])]
    model.traces = getattr(model, "traces", 0) + 1
    for _ in range(trip.epochs):
        for x, y in data.batches(16):
            for optimiser in optimisers:
                model.zero_grad()
                noise = model.traces * (torch.rand(()) + np.random.rand() + random.random())
                cross_entropy(model(x + 0.1 * float(noise)), y).backward()
                optimiser.step()
        yield


def build(method: Any = "fedasmu", trainer: Any = my_train, **more: Any) -> Federation:
    run = {"executor": "serial", "per_round": 3, "eval_every": 10.0, "checkpoint_every": 5.0}
    training = {"epochs": 3, "batch_size": 16, "fast": False} | more.pop("training", {})
    fleet = {"fastest": 3.0, "ratio": 4.0, "time": "trip"}
    given = {"devices": 8, "method": method, "training": training, "fleet": fleet, "run": run | more.pop("run", {})}
    return Federation(net, samples(300), samples(60), trainer=trainer, **(given | more))


def log(result: Result, *, metrics: bool = True) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (Path(result.directory) / "events.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if metrics or not key.startswith("train_")} for row in rows]


@pytest.fixture(scope="module")
def pool() -> Any:
    built = WorkerPool(2)
    yield built
    built.close(now=True)


@pytest.mark.parametrize("method", METHODS)
def test_plain_sgd_is_the_run_of_the_built_in_loop(method, tmp_path):
    mine, builtin = (build(method, loop).run(60, out=tmp_path / str(bool(loop))) for loop in (my_train, None))
    assert mine.summary["weights_sha256"] == builtin.summary["weights_sha256"]
    assert log(mine, metrics=False) == log(builtin)
    if method == "fedasmu":
        assert any(row["kind"] == "merge" for row in log(mine))
    if method not in METHODS[:3]:
        assert any(row["kind"] == "hurry" for row in log(mine))
    uploads = [row for row in log(mine) if row["kind"] == "upload"]
    assert uploads and any(0 < row.get("train_loss", 0) < 10 for row in uploads)
    assert audit(RunDirectory(mine.directory)).problem is None


@pytest.mark.parametrize("method", METHODS[:3])
def test_two_workers_give_the_bits_of_one_process(method, tmp_path, pool):
    one = build(method, wild).run(60, out=tmp_path / "one")
    two = build(method, wild).run(60, out=tmp_path / "two", pool=pool)
    assert log(one) == log(two) and one.summary["weights_sha256"] == two.summary["weights_sha256"]
    assert one.values[-1] != one.values[0]


@pytest.mark.parametrize("method", METHODS[:3])
def test_a_resumed_run_is_the_uninterrupted_one(method, tmp_path):
    class Stop(Observer):
        def on_progress(self, time: float) -> None:
            if time > 31.0:
                raise KeyboardInterrupt

    whole = build(method, wild).run(60, out=tmp_path / "whole")
    build(method, wild).run(60, out=tmp_path / "cut", observers=[Stop()])
    again = build(method, wild).resume(tmp_path / "cut")
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"] and log(again) == log(whole)


def test_the_configuration_says_that_the_loop_is_the_users(tmp_path):
    result = build().run(20, out=tmp_path / "run")
    config = RunDirectory(result.directory).config()
    assert config["training"]["trainer"] == "custom"
    with pytest.raises(ConfigError, match=r"training\.trainer: 'custom' stands for a function given from Python"):
        build(trainer=None, training={"trainer": "custom"})
    assert "trainer" not in build(trainer=None).config.to_hash()["training"]


REFUSED = {
    "loss": ({"method": "moon", "model": "mlp"}, "trainer: moon changes the loss of every step"),
    "momentum of a step": ({"training": {"clip": 1.0}}, r"training\.clip: is for the built-in loop"),
    "decay": ({"training": {"weight_decay": 0.1}}, r"training\.weight_decay: is for the built-in loop"),
    "steps": ({"training": {"steps": 30}}, r"training\.steps: is for the built-in loop"),
    "arguments": ({"trainer": lambda model: None}, r"trainer: must take \(model, data, trip\)"),
    "no function": ({"trainer": 3}, r"trainer: must be a function my_train"),
    "attack": ({"attack": {"kind": "label-flip"}}, r"attack\.kind: label-flip changes the batches"),
    "personalise": ({"run": {"personalise": 2, "evaluate_devices": "end"}}, r"run\.personalise: trains with the"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_own_loop_cannot_do_is_one_sentence(what):
    given, text = REFUSED[what]
    with pytest.raises(ConfigError, match=text) as caught:
        Federation(**({"model": "mlp", "trainer": my_train} | given))
    assert "\n" not in str(caught.value)


def test_a_loop_in_one_piece_needs_a_method_without_fresh_models():
    def piece(model: Any, data: Any, trip: Any) -> None: ...

    piece.pauses = False  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="fedasmu merges fresh models in mid-training, but this trainer"):
        build("fedasmu", piece)
    assert build({"name": "fedasmu", "adaptive_device": False}, piece) and build("fedavg", piece)


# ---- deployed

MLP_TRAINING = {"epochs": 3, "batch_size": 16, "fast": False}


def uploads_of(folder: Path, device: Device, training: dict[str, Any], fresh: str) -> list[Any]:
    method = {"name": "fedasmu", "slot": 2, "refresh": 2}
    fed = FakeFederation(folder, method, fresh=fresh, training=training)
    fed.device = device
    found = []
    fed.step()
    for turn in range(18):  # some devices are slower, so that others find newer models
        for number in list(fed.transport.sent)[turn % 2 :]:
            answer = fed.answer(number)
            fed.transport.put(number, wire.answer_record(answer))
            if answer.upload is not None:
                found.append(answer.upload)
        fed.step()
        fed.step()
    return found


@pytest.mark.parametrize("fresh", ["messages", "none"])
def test_a_device_trains_with_its_own_loop_also_where_fresh_models_come_by_message(fresh, tmp_path):
    """A paused loop cannot be kept: it trains again from the start of the trip, with the same bits."""
    builtin = uploads_of(tmp_path / "builtin", Device(), MLP_TRAINING, fresh)
    own = MLP_TRAINING | {"trainer": "custom"}
    mine = uploads_of(tmp_path / "mine", Device(trainer=my_train), own, fresh)
    assert len(mine) == len(builtin) > 3
    assert [each.weights.tobytes() for each in mine] == [each.weights.tobytes() for each in builtin]
    assert [each.merges for each in mine] == [each.merges for each in builtin]
    assert any(each.merges for each in mine) == (fresh == "messages")


def test_a_device_names_its_loop(tmp_path):
    fed = FakeFederation(tmp_path, "fedavg", fresh="none", training=MLP_TRAINING | {"trainer": "custom"})
    fed.step()
    [node, content] = next(iter(fed.transport.sent.values()))
    order, place = wire.read_order(content), {"folder": str(tmp_path / "memory")}
    with pytest.raises(ConfigError, match=r"training\.trainer: 'custom'"):
        Device().handle(order, fed.config, place, node)
    with pytest.raises(ConfigError, match="--trainer: must be module:function"):
        Device().handle(order, fed.config, place | {"trainer": "nothing"}, node)
    answer = Device().handle(order, fed.config, place | {"trainer": "tests.test_own_trainer:my_train"}, node)
    assert answer.upload is not None and "train_loss" in answer.upload.report


def device_scores(directory: Path) -> list[Any]:
    return [event for event in RunDirectory(directory).events() if event["kind"] in ("devices", "evaluate")]


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_devices_are_scored_with_the_model_that_they_have(method: str, tmp_path: Path) -> None:
    """Own parts or own models: the same scores as with the built-in loop, on workers too."""

    def run(name: str, trainer: Any, executor: str = "serial") -> list[Any]:
        made = Federation(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
            samples(120),
            samples(60),
            devices=6,
            method=method,
            local=["last"] if method == "fedavg" else None,
            trainer=trainer,
            training={"epochs": 2, "lr": 0.2, "fast": False},
            run={"executor": executor, "workers": 2, "per_round": 3, "eval_every": 10.0, "evaluate_devices": 1},
        )
        made.run(30, out=tmp_path / name)
        return device_scores(tmp_path / name)

    built_in, own = run("built-in", None), run("own", my_train)
    assert own == built_in and len(own) > 4
    assert run("workers", my_train, "processes") == own


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"method": "fedrep"}, "trains the parts that stay on the device apart"),
        ({"method": "pisces"}, "needs the training loss"),
        ({"method": "fedavg", "run": {"selection": "oort"}}, "selects by losses"),
        ({"method": "fedavg", "run": {"selection": "power_of_choice"}}, "selects by losses"),
    ],
)
def test_what_only_the_built_in_loop_reports_or_moves_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Federation(net, samples(60), samples(30), devices=6, trainer=my_train, **given)


def test_samples_of_another_form_come_as_they_were_given() -> None:
    texts = [{"text": "abc", "ids": np.arange(k + 1), "label": k % 2} for k in range(12)]
    seen: list[Any] = []

    def look(model: Any, data: Any, trip: Any) -> None:
        seen.extend(data[place] for place in range(len(data)))
        raise KeyError("seen enough")

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 2)

        def forward(self, ids: Any) -> Any:
            return self.embedding(ids).mean(1)

    def collate(found: list[Any]) -> Any:
        longest = max(len(each["ids"]) for each in found)
        ids = torch.zeros(len(found), longest, dtype=torch.int64)
        for row, each in zip(ids, found, strict=True):
            row[: len(each["ids"])] = torch.as_tensor(each["ids"])
        return {"ids": ids, "label": torch.tensor([int(each["label"]) for each in found])}

    run = {"executor": "serial", "per_round": 2}
    made = Federation(Bag, texts, texts, devices=2, collate=collate, trainer=look, method="fedavg", run=run)
    with pytest.raises(KeyError, match="seen enough"):
        made.run(30)
    assert {each["text"] for each in seen} == {"abc"} and all(len(each["ids"]) >= 1 for each in seen)
