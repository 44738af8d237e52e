"""A run is only gone on with over what it was made of: other data, shards, model or fleet are refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from freshet import Federation, Fleet, RunError, Stop
from freshet.assembly import WORDS, differing, digest, unequal
from freshet.runs.writer import Observer

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
SHARDS = [list(range(k, 60, 3)) for k in range(3)]
FLEET = Fleet([4.0, 5.0, 6.0], 1e5, 1e5)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def half_frozen(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for parameter in module[0].parameters():
        parameter.requires_grad = False
        parameter.data.fill_(value)
    return module


def federation(**given: Any) -> Federation:
    parts: dict[str, Any] = {"model": linear, "train": (X, Y), "test": (X[:20], Y[:20]), "shards": SHARDS}
    parts |= {"fleet": FLEET, "method": "fedasync"} | given
    run = {"until": 30.0, "eval_every": 10.0, "per_round": 2, "executor": "serial"}
    return Federation(run=run, **parts)


class StopAt(Observer):
    def __init__(self, time: float) -> None:
        self.time = time

    def on_progress(self, time: float) -> None:
        if time >= self.time:
            raise Stop


def changed(array: np.ndarray, place: Any) -> np.ndarray:
    other = array.copy()
    other[place] = other[place] + 1 if array.dtype == np.float32 else (other[place] + 1) % 3
    return other


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "one input": ("data", {"train": (changed(X, (59, 3)), Y)}),
    "one label": ("data", {"train": (X, changed(Y, 7))}),
    "one test label": ("data", {"test": (X[:20], changed(Y[:20], 19))}),
    "one sample elsewhere": ("shards", {"shards": [SHARDS[0][:-1], SHARDS[1], [*SHARDS[2], SHARDS[0][-1]]]}),
    "another order": ("shards", {"shards": [SHARDS[0][::-1], *SHARDS[1:]]}),
    "another start": ("model", {"model": lambda: linear().requires_grad_() if torch.rand(1) < 2 else None}),
    "a slower device": ("fleet", {"fleet": replace(FLEET, train_seconds=np.array([4.0, 5.0, 6.5]))}),
    "losses": ("fleet", {"fleet": replace(FLEET, loss=0.1)}),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "run"
    federation().run(out=directory, observers=[StopAt(15.0)])
    return directory


def test_world_json_holds_one_short_hash_for_each_part(stopped: Path) -> None:
    kept = json.loads((stopped / "world.json").read_text())["fingerprint"]
    assert kept == federation().fingerprint, "the same again, from the same parts"
    assert list(kept) == ["data", "shards", "model", "fleet"]
    assert all(len(each) == 16 and int(each, 16) >= 0 for each in kept.values())


@pytest.mark.parametrize("name", OTHERS)
def test_another_part_changes_its_hash_alone_and_is_refused_by_name(name: str, stopped: Path) -> None:
    part, given = OTHERS[name]
    mine, other = federation().fingerprint, federation(**given)
    assert [key for key in mine if mine[key] != other.fingerprint[key]] == [part]
    log = (stopped / "events.jsonl").read_bytes()
    with pytest.raises(RunError, match=f"was made with other {part}") as caught:
        other.resume(stopped)
    assert "\n" not in str(caught.value)
    assert (stopped / "events.jsonl").read_bytes() == log, "nothing is cut off"


def test_what_follows_from_other_data_is_not_named_beside_them() -> None:
    mine = {"data": "a", "shards": "b", "model": "c", "fleet": "d"}
    assert differing(mine, mine) == []
    assert differing(mine, {"data": "x", "shards": "x", "model": "c", "fleet": "x"}) == ["data"]
    assert differing(mine, {"data": "a", "shards": "x", "model": "x", "fleet": "x"}) == [WORDS["shards"], "model"]


def test_settings_that_are_not_the_same_are_named_and_of_another_method_only_its_name() -> None:
    mine = {"method": {"name": "fedasync", "alpha": 0.6}, "training": {"lr": 0.1, "clip": 0.0}}
    assert unequal(mine, mine) == []
    assert unequal(mine, {**mine, "training": {"lr": 0.2}}) == ["training.lr", "training.clip"]
    assert (
        unequal(mine, {**mine, "links": {"loss": 0.1}})
        == unequal({**mine, "links": {"loss": 0.1}}, mine)
        == ["links.loss"]
    )
    assert unequal(mine, {**mine, "method": {"name": "fedavg"}, "training": {"lr": 0.2}}) == ["method.name"]


def test_numbers_that_do_not_train_are_part_of_the_model() -> None:
    one, two = (federation(model=lambda value=value: half_frozen(value)).fingerprint for value in (0.5, 0.25))
    assert [key for key in one if one[key] != two[key]] == ["model"]
    start = federation(model=linear, seed=1).fingerprint["model"]
    assert start != federation(seed=2).fingerprint["model"], "another seed, another start"


def test_a_trace_counts_by_what_it_says_not_by_its_name(tmp_path: Path) -> None:
    lines = ["device,from,seconds_per_sample", "a,0,0.1", "b,0,0.2", "c,0,0.3"]
    found = []
    for name, content in (("one.csv", lines), ("two.csv", lines), ("three.csv", [*lines, "c,50,0.4"])):
        (tmp_path / name).write_text("\n".join(content))
        found.append(federation(fleet={"trace": str(tmp_path / name)}).fingerprint["fleet"])
    assert found[0] == found[1] != found[2]


class Rows(Dataset):
    def __init__(self, x: np.ndarray, noise: bool = False) -> None:
        self.x, self.noise = torch.from_numpy(x), noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return self.x[k] + (torch.rand(4) if self.noise else 0), int(Y[k])


def test_data_outside_memory_count_by_labels_and_an_even_sample() -> None:
    def of(x: np.ndarray, **given: Any) -> str:
        lazy = federation(train=Rows(x, **given), test=Rows(X[:20]), data={"lazy": True})
        return lazy.fingerprint["data"]

    assert of(X) == of(X.copy())
    assert of(X) != of(changed(X, (59, 0)))
    assert of(X, noise=True) == of(X, noise=True), "a source that draws anew each time can be gone on with"


def test_the_hash_sees_types_shapes_and_order_but_not_how_an_array_lies_in_memory() -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest([a]) == digest([np.asfortranarray(a)])
    others = [a.reshape(4, 3), a.astype(np.float64), a[::-1], a.T]
    assert len({digest([each]) for each in [a, *others]}) == 5
    assert digest([a, 1]) != digest([1, a])
    assert digest([np.zeros((0, 3)), np.zeros(())]) != digest([np.zeros((3, 0)), np.zeros(())])
    big = np.arange(5000.0)
    assert digest([big]) != digest([np.append(big[:-1], 1.0)]), "beyond the rows that are hashed at a time"


def test_what_only_one_side_knows_does_not_differ() -> None:
    assert differing({"data": "a", "fleet": "b"}, {"data": "a"}) == []
    assert differing({"data": "a", "model": "b"}, {"data": "c", "model": "d"}) == ["data", "model"]


def test_a_run_without_hashes_is_resumed_all_the_same(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    federation().run(out=directory, observers=[StopAt(15.0)])
    world = json.loads((directory / "world.json").read_text())
    del world["fingerprint"]
    (directory / "world.json").write_text(json.dumps(world))
    assert federation().resume(directory).summary["status"] == "finished"


def test_shards_given_from_python_leave_out_what_is_held_out() -> None:
    whole, part = federation(), federation(data={"validation": 0.25})
    assert len(part.dataset.y_test) == 15 and len(part.dataset.y_train) == 45
    assert sorted(np.concatenate(part.shards)) == list(range(45)), "each remaining sample once"
    for before, after in zip(whole.shards, part.shards, strict=True):
        left = {tuple(row) for row in part.dataset.x_train[after]}
        assert left < {tuple(row) for row in whole.dataset.x_train[before]}, "on the device that it was on"


def test_a_changed_federation_keeps_what_was_brought() -> None:
    first = federation()
    other = first.with_settings({"training.lr": 0.01, "run.seed": 0})
    assert (other.config.training.lr, other.fingerprint) == (0.01, first.fingerprint)
    with pytest.raises(ValueError, match=r"lr: is not a setting; write section\.key"):
        first.with_settings({"lr": 1})
