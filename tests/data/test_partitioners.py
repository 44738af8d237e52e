"""Partitions given as a function or as a partitioner object of Flower Datasets."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freshet import Federation
from freshet.data.partition import iid
from freshet.data.shards import by_partitioner
from freshet.errors import ConfigError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(120, 4)).astype(np.float32), RNG.integers(0, 3, 120)
TEST = (X[:20], Y[:20])


def federation(partition: Any, **settings: Any) -> Federation:
    data = {"partition": partition} | settings.pop("data", {})
    return Federation("mlp", train=(X, Y), test=TEST, data=data, **settings)


# ---- functions


def test_a_function_deals_the_samples() -> None:
    def odd_and_even(labels: np.ndarray, devices: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [np.arange(k, len(labels), devices) for k in range(devices)]

    found = federation(odd_and_even, devices=2)
    assert [shard.tolist() for shard in found.shards] == [list(range(0, 120, 2)), list(range(1, 120, 2))]
    assert found.config.data.partition == "custom"


def test_a_function_draws_from_the_seed() -> None:
    shards = [[s.tolist() for s in federation(iid, devices=5, seed=seed).shards] for seed in (1, 1, 2)]
    assert shards[0] == shards[1] != shards[2]


def test_a_function_deals_a_built_in_data_set() -> None:
    found = Federation(data={"name": "digits", "partition": iid}, devices=6)
    assert sum(map(len, found.shards)) == 1438


def test_a_function_sees_no_held_out_sample() -> None:
    found = federation(iid, devices=5, data={"validation": 0.25})
    assert np.sort(np.concatenate(found.shards)).tolist() == list(range(90))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda labels, devices, rng: [[0]], r"one per device \(5\), but 1 were given"),
        (lambda labels, devices, rng: [[200]] * devices, "names a sample outside"),
        (lambda labels: [], "the function failed"),
        (lambda labels, devices, rng: 1 / 0, r"the function failed \(division by zero\)"),
    ],
)
def test_a_wrong_function_is_one_sentence(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.partition: .*{words}"):
        federation(function, devices=5)


def test_shards_and_a_partition_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        federation(iid, shards=[[0], [1]])


# ---- partitioners


class Table:
    """The part of ``datasets.Dataset`` that partitioners and Freshet use."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = {name: np.asarray(column) for name, column in columns.items()}

    @staticmethod
    def from_dict(columns: dict[str, Any]) -> "Table":
        return Table(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select(self, rows: np.ndarray) -> "Table":
        return Table({name: column[rows] for name, column in self.columns.items()})

    def select_columns(self, names: list[str]) -> "Table":
        return Table({name: self.columns[name] for name in names})

    def with_format(self, kind: str) -> "Table":
        return self

    def __getitem__(self, rows: slice) -> dict[str, np.ndarray]:
        return {name: column[rows] for name, column in self.columns.items()}


class ByColumn:
    """One part per value of a column, or ``parts`` parts in turn; takes its samples once."""

    def __init__(self, column: str = "", parts: int = 0) -> None:
        self.column, self.parts, self._table = column, parts, None

    @property
    def dataset(self) -> Table:
        if self._table is None:
            raise AttributeError("no samples yet")
        return self._table

    @dataset.setter
    def dataset(self, table: Table) -> None:
        if self._table is not None:
            raise ValueError("assigned only once")
        self._table = table

    def is_dataset_assigned(self) -> bool:
        return self._table is not None

    @property
    def _key(self) -> np.ndarray:
        if self.column:
            return np.unique(self.dataset.columns[self.column], return_inverse=True)[1]
        return np.arange(len(self.dataset)) % self.parts

    @property
    def num_partitions(self) -> int:
        return 1 + int(self._key.max())

    def load_partition(self, part: int) -> Table:
        return self.dataset.select(np.flatnonzero(self._key == part))


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Table))


@pytest.mark.usefixtures("datasets")
def test_a_partitioner_decides_parts_and_number_of_devices() -> None:
    given = ByColumn("label")
    for _ in range(2):  # the object itself stays as it is
        found = federation(given)
        assert found.config.fleet.devices == 3
        assert [set(Y[shard]) for shard in found.shards] == [{0}, {1}, {2}]
    assert not given.is_dataset_assigned()


@pytest.mark.usefixtures("datasets")
def test_a_partitioner_sees_the_groups_as_a_column() -> None:
    groups = np.arange(120) // 30
    found = Federation("mlp", train=(X, Y), test=TEST, groups=groups, data={"partition": ByColumn("group")})
    assert [set(groups[shard]) for shard in found.shards] == [{0}, {1}, {2}, {3}]


@pytest.mark.usefixtures("datasets")
def test_a_partitioner_on_a_built_in_data_set_and_with_validation() -> None:
    found = Federation(data={"name": "digits", "partition": ByColumn(parts=4), "validation": 0.1}, devices=4)
    assert np.sort(np.concatenate(found.shards)).tolist() == list(range(len(found.dataset.y_train)))
    with pytest.raises(ConfigError, match=r"makes 4 parts, but there are 40 devices; set fleet\.devices to 4"):
        Federation(data={"name": "digits", "partition": ByColumn(parts=4)})


@pytest.mark.usefixtures("datasets")
def test_wrong_partitioners_are_one_sentence() -> None:
    used = ByColumn("label")
    used.dataset = Table({"label": Y})
    for given, words in ((ByColumn("nope"), "ByColumn failed .*nope"), (used, "has a dataset already")):
        with pytest.raises(ConfigError, match=rf"^data\.partition: .*{words}"):
            federation(given)


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="install flwr-datasets"):
        federation(ByColumn("label"))


# ---- the real ones

flower_datasets = pytest.mark.skipif(find_spec("flwr_datasets") is None, reason="needs flwr-datasets")


@flower_datasets
@pytest.mark.parametrize("form", ["arrays", "table"])
def test_partitioners_of_flower_datasets(form: str) -> None:
    import datasets
    from flwr_datasets import partitioner as flower

    groups = np.arange(120) % 7
    table = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y, "group": groups})
    samples = table if form == "table" else {"freshet_row": np.arange(120), "label": Y, "group": groups}
    for given, parts in (
        (flower.IidPartitioner(num_partitions=6), 6),
        (flower.DirichletPartitioner(num_partitions=3, partition_by="label", alpha=1.0, min_partition_size=5), 3),
        (flower.ShardPartitioner(num_partitions=4, partition_by="label", num_shards_per_partition=2), 4),
        (flower.NaturalIdPartitioner(partition_by="group"), 7),
        (flower.LinearPartitioner(num_partitions=5), 5),
    ):
        first, second = by_partitioner(given, samples), by_partitioner(given, samples)
        assert len(first) == parts
        assert np.sort(np.concatenate(first)).tolist() == list(range(120))
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@flower_datasets
def test_a_table_keeps_its_columns_for_the_partitioner() -> None:
    import datasets
    from flwr_datasets.partitioner import NaturalIdPartitioner

    writers = np.arange(120) // 40
    table = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y, "writer": writers})
    data = {"partition": NaturalIdPartitioner(partition_by="writer"), "input_column": "x", "label_column": "label"}
    for more in ({}, {"validation": 0.2}):
        found = Federation("mlp", train=table, test=TEST, data=data | more)
        assert len(found.shards) == 3
    whole = Federation("mlp", train=table, test=TEST, data=data)
    assert [set(writers[shard]) for shard in whole.shards] == [{0}, {1}, {2}]
    with pytest.raises(ConfigError, match=r"data\.train_samples"):
        Federation("mlp", train=table, test=TEST, data=data | {"train_samples": 50})
