"""Batches of any form train under every kind of method, with the same bits everywhere and after a resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from freshet import ConfigError, Federation, RunError, Task
from tests.sim.helpers import Crash, CrashError

from .helpers import assert_same_run

METHODS = ("fedasmu", "fedbuff", "fedavg")
UNTIL = 40.0


class Bag(nn.Module):
    """Classifies by the mean embedding of the tokens that the mask keeps; takes one tensor, several, or names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: Tensor, mask: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        keep = (ids > 0 if mask is None else mask > 0)[..., None].float()
        z = (self.embedding(ids) * keep).sum(1) / keep.sum(1).clamp_min(1)
        return self.head(self.drop(z) + (0.0 if shift is None else shift[:, None]))


def tokens(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Sentences of 1 to 9 tokens. The first one tells the class."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        y = int(rng.integers(3))
        found.append(([y + 1, *rng.integers(4, 40, rng.integers(0, 9)).tolist()], y))
    return found


def drop_and_pad(batch: list[Any]) -> tuple[Tensor, Tensor]:
    """Pads and drops tokens at random, as collators of masked language models do."""
    length = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    for row, (sentence, _) in enumerate(batch):
        ids[row, : len(sentence)] = torch.tensor(sentence)
    return ids * (torch.rand(ids.shape) > 0.1), torch.tensor([y for _, y in batch])


WORDS = " ".join(f"w{k}" for k in range(40)).split()


def tokenise(batch: list[Any]) -> dict[str, Tensor]:
    pairs = [([WORDS.index(word) for word in sample["text"].split()], sample["label"]) for sample in batch]
    ids, y = drop_and_pad(pairs)
    return {"ids": ids, "label": y}


def by_name(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output: Tensor = model(batch["ids"])
    return output


WHOLE = Task(
    lambda output, batch: cross_entropy(output, batch["label"]),
    {"accuracy": lambda output, batch: output.argmax(1) == batch["label"]},
    "accuracy",
    forward=by_name,
)
REBUILD = Task(lambda output, x: mse_loss(output, x))


def parts_of(kind: str) -> dict[str, Any]:
    """Model, samples and task of one kind of batch."""
    train, test = tokens(160, 0), tokens(60, 1)

    def each(make: Any) -> dict[str, Any]:
        return {"train": [make(*sample) for sample in train], "test": [make(*sample) for sample in test]}

    if kind == "dicts":
        return {"model": Bag(), "task": WHOLE} | each(lambda ids, y: {"ids": ids, "label": y})
    if kind == "dicts with a target":
        return {"model": Bag()} | each(lambda ids, y: {"ids": ids, "mask": [1] * len(ids), "label": y})
    if kind == "three parts":
        return {"model": Bag()} | each(lambda ids, y: (ids, [1] * len(ids), y))
    if kind == "nested":
        return {"model": Bag()} | each(lambda ids, y: ({"ids": ids, "shift": 0.1 * len(ids)}, y))
    if kind == "random collate":
        return {"model": Bag(), "collate": drop_and_pad} | each(lambda ids, y: (ids, y))
    if kind == "padded pairs":
        return {"model": Bag(), "collate": "pad"} | each(lambda ids, y: (torch.tensor(ids), y))
    if kind == "texts":
        named = each(lambda ids, y: {"text": " ".join(WORDS[k] for k in ids), "label": y})
        return {"model": Bag(), "collate": tokenise, "task": WHOLE} | named
    assert kind == "single arrays"
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))
    samples = rng.normal(size=(160, 6)).astype(np.float32)
    return {"model": model, "task": REBUILD, "train": samples, "test": samples[:50]}


KINDS = (
    "dicts",
    "dicts with a target",
    "three parts",
    "nested",
    "random collate",
    "padded pairs",
    "texts",
    "single arrays",
)


def federation(kind: str, method: str, **run: Any) -> Federation:
    torch.manual_seed(0)
    options = {"name": method} | ({"K": 3} if method == "fedbuff" else {})
    run = {"executor": "serial", "eval_every": 20.0, "per_round": 3, "in_flight": 5, "checkpoint_every": 7.0} | run
    run.setdefault("until", UNTIL)
    training = {"epochs": 2, "lr": 0.2, "batch_size": 16}
    return Federation(devices=6, method=options, training=training, run=run, seed=2, **parts_of(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_processes_and_a_resumed_run_give_the_same_bits(kind: str, method: str, pool_of, tmp_path: Path) -> None:
    alone = federation(kind, method).run(out=tmp_path / "alone")
    assert alone.loss[-1] < alone.loss[0] and alone.summary["rejected"] == 0
    assert_same_run(federation(kind, method).run(out=tmp_path / "spread", pool=pool_of(2)), alone)
    lines = len((tmp_path / "alone" / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(CrashError):
        federation(kind, method).run(out=tmp_path / "cut", observers=[Crash(2 * lines // 3)])
    assert_same_run(federation(kind, method).resume(tmp_path / "cut"), alone)


def test_dicts_and_arrays_of_the_same_numbers_train_the_same_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(150, 8)).astype(np.float32), rng.integers(0, 3, 150)
    torch.manual_seed(0)
    given = {"model": nn.Linear(8, 3), "devices": 5, "training": {"optimiser": "adam", "lr": 0.01}, "seed": 1}
    given["run"] = {"executor": "serial"}
    arrays = Federation(train=(x[:120], y[:120]), test=(x[120:], y[120:]), **given).run(30, out=tmp_path / "arrays")
    rows = [{"features": a, "label": int(b)} for a, b in zip(x, y, strict=True)]
    dicts = Federation(train=rows[:120], test=rows[120:], **given).run(30, out=tmp_path / "dicts")
    assert np.array_equal(arrays.weights, dicts.weights)
    assert arrays.accuracy.tolist() == dicts.accuracy.tolist()
    assert arrays.loss == pytest.approx(dicts.loss)


def test_devices_can_be_scored_and_personalised(tmp_path: Path) -> None:
    run = {"evaluate_devices": "end", "personalise": 2}
    row = federation("dicts with a target", "fedavg", **run).run(out=tmp_path / "run").rows[-1]
    assert 0 <= row["devices_worst"] <= row["devices_best"] <= 1


def test_other_samples_or_another_collate_are_not_resumed(tmp_path: Path) -> None:
    parts = parts_of("random collate")
    given = {"devices": 4, "method": "fedavg", "run": {"executor": "serial", "until": 30.0}, "seed": 1}
    Federation(**parts, **given).run(out=tmp_path / "run")
    longer = {**given, "run": {"executor": "serial", "until": 60.0}}
    for other in ({"train": parts["train"][::-1]}, {"collate": "pad"}):
        with pytest.raises(RunError, match="made with other data"):
            Federation(**parts | other, **longer).resume(tmp_path / "run", until=60)


def first_token_as_class(batch: list[Any]) -> tuple[Tensor, Tensor]:
    return drop_and_pad([(ids, ids[0] - 1) for ids in batch])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"run.evaluate_devices": "end"}, r"run\.evaluate_devices"),
        ({"attack.kind": "label-flip"}, r"attack\.kind"),
    ],
)
def test_labels_that_only_collate_knows_are_no_classes_of_samples(settings: dict[str, str], key: str) -> None:
    ids = [ids for ids, _ in tokens(60, 0)]
    given = {"collate": first_token_as_class, "devices": 4, "run": {"executor": "serial"}}
    made = Federation(Bag(), train=ids, test=ids[:20], **given)
    assert made.config.data.partition == "iid" and made.assembly.dataset.y_train.shape == (60, 0)
    with pytest.raises(ConfigError, match=f"{key}: needs one class label per sample"):
        made.with_settings(settings)
