"""User data: torch Datasets and Subsets, Hugging Face tables (real ones if the library is installed), lazy reading."""

import pickle
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from freshet import ConfigError, DataError, Federation
from freshet.compute.share import pack_setup, unpack_setup
from freshet.data import from_arrays
from freshet.data.adapters import LazyRows, stored_labels
from freshet.training.batches import FederatedData, Samples
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Setup

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 3
IMAGES = RNG.integers(0, 256, (40, 3, 6, 6), dtype=np.uint8)


class Label:
    """A minimal Hugging Face ``ClassLabel``."""

    names = ("cat", "dog", "eel")


class FakeTable:
    """The part of ``datasets.Dataset`` that Freshet uses: rows by list or slice as a dict of columns."""

    def __init__(self, columns: dict, labels: tuple[str, ...] = ()) -> None:
        self.columns, self.labels = columns, labels
        self.reads: list[int] = []

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    @property
    def features(self) -> dict:
        return {name: Label() if name in self.labels else "Value" for name in self.columns}

    def select_columns(self, names: list[str]) -> "FakeTable":
        part = FakeTable({name: self.columns[name] for name in names}, self.labels)
        part.reads = self.reads
        return part

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        rows = range(len(self))[key] if isinstance(key, slice) else key
        self.reads.append(len(rows))
        return {name: [values[row] for row in rows] for name, values in self.columns.items()}


def real_table(columns: dict, labels: tuple[str, ...] = ()):
    import datasets

    table = datasets.Dataset.from_dict(columns)
    for name in labels:
        table = table.cast_column(name, datasets.ClassLabel(names=list(Label.names)))
    return table


real = pytest.param(real_table, marks=pytest.mark.skipif(find_spec("datasets") is None, reason="needs the extra hub"))
tables = pytest.mark.parametrize("table", [FakeTable, real], ids=["as described", "datasets"])


def columns(**more) -> dict:
    return {"features": X.tolist(), "label": Y.tolist(), **more}


@tables
def test_a_hugging_face_table_is_the_same_as_its_arrays(table):
    arrays = from_arrays("a", (X, Y), (X, Y))
    found = from_arrays("b", *[table(columns(), ("label",))] * 2)
    np.testing.assert_array_equal(arrays.x_train, found.x_train)
    np.testing.assert_array_equal(arrays.y_test, found.y_test)
    assert found.class_names == Label.names
    assert found.x_train.dtype == np.float32


@tables
def test_ambiguous_columns_must_be_named(table):
    many = table(columns(user=[f"u{k % 5}" for k in range(40)]))
    with pytest.raises(DataError, match=r"columns features, label, user; name the inputs with data\.input_column"):
        from_arrays("t", many, many)
    found = from_arrays("t", many, many, input_column="features", groups="user")
    assert sorted(set(found.groups.tolist())) == ["u0", "u1", "u2", "u3", "u4"]
    with pytest.raises(DataError, match=r"no column 'pixels' \(data\.input_column\); columns: features, label, user"):
        from_arrays("t", many, many, input_column="pixels")
    with pytest.raises(DataError, match="have no column 'nobody'"):
        from_arrays("t", many, many, input_column="features", groups="nobody")
    odd = table({"a": X.tolist(), "b": Y.tolist()})
    with pytest.raises(DataError, match=r"name the labels with data\.label_column"):
        from_arrays("t", odd, odd)
    np.testing.assert_array_equal(from_arrays("t", odd, odd, label_column="b").y_train, Y)


@tables
def test_texts_and_rows_of_different_lengths_give_one_sentence(table):
    texts = table({"text": ["so", "good"] * 2, "label": [0, 1] * 2})
    with pytest.raises(DataError, match="turn them into numbers"):
        from_arrays("t", texts, texts)
    ragged = table({"ids": [[1], [2, 3]] * 2, "label": [0, 1] * 2})
    with pytest.raises(DataError, match="samples differ in shape"):
        from_arrays("t", ragged, ragged)
    named = table({"x": X[:4].tolist(), "label": ["a", "b"] * 2})
    with pytest.raises(DataError, match="labels have type"):
        from_arrays("t", named, named)


@tables
def test_images_of_a_table_are_read_with_channels_first(table):
    from PIL import Image

    pictures = [Image.fromarray(image.transpose(1, 2, 0)) for image in IMAGES]
    found = from_arrays("t", *[table({"image": pictures, "label": Y.tolist()})] * 2)
    np.testing.assert_array_equal(found.x_train, IMAGES)


def test_subsets_and_joined_datasets_are_the_same_as_their_arrays():
    whole = TensorDataset(torch.tensor(X), torch.tensor(Y))
    part = Subset(Subset(whole, list(range(5, 40))), [3, 1, 2])
    found = from_arrays("t", part, ConcatDataset([whole, part]), 3)
    np.testing.assert_array_equal(found.x_train, X[[8, 6, 7]])
    np.testing.assert_array_equal(found.y_test, np.concatenate([Y, Y[[8, 6, 7]]]))
    np.testing.assert_array_equal(stored_labels(part), Y[[8, 6, 7]])
    assert stored_labels(ConcatDataset([whole])) is None


def test_real_labels_are_not_truncated_to_integers():
    floats = TensorDataset(torch.tensor(X), torch.tensor(Y + 0.7))
    for lazy in (False, True):
        dataset = from_arrays("t", floats, floats, lazy=lazy)
        np.testing.assert_array_equal(dataset.y_train, (Y + 0.7).astype(np.float32))
        assert not dataset.has_classes


# ---- lazy reading


class Counted(Dataset):
    """Counts reads and pickles."""

    def __init__(self, x: np.ndarray, y: np.ndarray, keep_labels: bool = False) -> None:
        self.x, self.y, self.read, self.pickled = x, y, [], 0
        if keep_labels:
            self.targets = y.tolist()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int):
        self.read.append(row)
        return torch.tensor(self.x[row]), int(self.y[row])

    def __getstate__(self):
        self.pickled += 1
        return self.__dict__.copy()


@pytest.mark.parametrize("x", [X, IMAGES], ids=["floats", "images"])
def test_lazy_batches_equal_batches_in_memory(x):
    source = Counted(x, Y)
    lazy, eager = from_arrays("t", source, source, lazy=True), from_arrays("t", (x, Y), (x, Y))
    assert (lazy.mean, lazy.std) == (eager.mean, eager.std)
    one, two = (Samples.of(data, test=False) for data in (lazy, eager))
    index = torch.tensor([7, 3, 30])
    for a, b in zip(one.take(index), two.take(index), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    augmented = [s.take(index, np.random.default_rng(1))[0] for s in (one, two)]
    assert torch.equal(*augmented)
    for (a, _), (b, _) in zip(one.chunks(16), two.chunks(16), strict=True):
        assert torch.equal(a, b)


def test_lazy_parts_read_the_right_samples():
    source = Counted(X, Y)
    lazy, eager = from_arrays("t", source, source, lazy=True), from_arrays("t", (X, Y), (X, Y))
    for change in (lambda d: d.subset(20, 10, 3), lambda d: d.with_validation(0.25, 1).subset(10)):
        a, b = change(lazy), change(eager)
        assert isinstance(a.x_train, LazyRows) and isinstance(a.x_test, LazyRows)
        np.testing.assert_array_equal(a.x_train.read(np.arange(len(a.y_train))), b.x_train)
        np.testing.assert_array_equal(a.x_test.read(np.arange(len(a.y_test))), b.x_test)


def test_with_a_list_of_labels_only_a_few_samples_are_read_early():
    source = Counted(X, Y, keep_labels=True)
    data = from_arrays("t", source, source, lazy=True)
    assert set(source.read) <= {0, 20, 39}
    source.read.clear()
    Samples.of(data, test=False).take(torch.tensor([11, 4]))
    assert source.read == [11, 4]


def test_a_list_of_labels_that_disagrees_with_the_samples_is_ignored():
    source = Counted(X, Y, keep_labels=True)
    source.targets = [9] * 40
    np.testing.assert_array_equal(from_arrays("t", source, source, lazy=True).y_train, Y)


@tables
def test_a_lazy_table_is_read_by_the_batch(table):
    found = from_arrays("t", *[table(columns())] * 2, lazy=True)
    x, y = Samples.of(found, test=False).take(torch.tensor([5, 1]))
    np.testing.assert_array_equal(x.numpy(), X[[5, 1]])
    assert y.tolist() == Y[[5, 1]].tolist()


def test_a_bad_sample_is_reported_when_it_is_read():
    x = X.copy()
    x[13, 2] = np.nan
    data = from_arrays("t", Counted(x, Y), Counted(X, Y), lazy=True)
    with pytest.raises(DataError, match="train sample 13 holds NaN"):
        Samples.of(data, test=False).take(torch.tensor([2, 13]))
    ids = np.full((40, 5), 9)
    with pytest.raises(DataError, match="need a vocabulary size"):
        from_arrays("t", Counted(ids, Y), Counted(ids, Y), lazy=True)
    ids[20] = 10
    data = from_arrays("t", Counted(ids, Y), Counted(ids, Y), lazy=True, vocabulary=10)
    with pytest.raises(DataError, match="sample 20 holds a token id outside"):
        data.x_train.read(np.array([20]))


def test_workers_get_a_lazy_data_set_once_and_share_its_memory():
    big = np.zeros((4000, 4), np.float32)
    source = Counted(big, np.arange(4000) % 2, keep_labels=True)
    data = FederatedData.of(from_arrays("t", source, source, lazy=True), [np.arange(4000)])
    parts = pack_setup(Setup(torch.nn.Identity, data, TrainingOptions(), 0))
    assert source.pickled == 1  # training and test set are the same object here
    assert sum(block.nbytes for block in parts.blocks) >= big.nbytes
    assert len(parts.message) < big.nbytes
    there = unpack_setup(parts.message, parts.blocks).data.train
    assert torch.equal(there.take(torch.tensor([5]))[0], data.train.take(torch.tensor([5]))[0])


RUN = {"per_round": 2, "period": 4.0, "in_flight": 3, "executor": "serial"}


def net() -> torch.nn.Module:
    return torch.nn.Linear(4, 3)


def run(path, executor: str = "serial", **given) -> dict:
    federation = Federation(net, devices=4, run=RUN | {"executor": executor, "workers": 2}, **given)
    return federation.run(12, out=path).summary


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_lazy_run_gives_the_same_bits_with_every_executor(tmp_path, executor):
    source = TensorDataset(torch.tensor(X), torch.tensor(Y))
    eager = run(tmp_path / "eager", train=(X, Y), test=(X, Y))
    lazy = run(tmp_path / "lazy", executor, train=source, test=source, data={"lazy": True})
    assert lazy["weights_sha256"] == eager["weights_sha256"]


@tables
def test_a_federation_takes_a_table(tmp_path, table):
    given = table(columns(user=[k % 4 for k in range(40)]))
    named = {"input_column": "features", "label_column": "label", "partition": "dirichlet"}
    found = run(tmp_path / "table", train=given, test=given, data=named)
    assert found["weights_sha256"] == run(tmp_path / "arrays", train=(X, Y), test=(X, Y))["weights_sha256"]
    by_user = Federation(net, given, given, groups="user", run=RUN, data={"input_column": "features"})
    assert [shard.tolist() for shard in by_user.shards] == [list(range(k, 40, 4)) for k in range(4)]


def test_groups_give_the_natural_partition_and_the_number_of_devices():
    users = np.array([f"user {k % 5}" for k in range(40)])
    federation = Federation(net, (X, Y), (X, Y), groups=users, run=RUN)
    assert federation.config.data.partition == "natural"
    assert federation.config.fleet.devices == 5
    assert [set(users[shard]) for shard in federation.shards] == [{f"user {k}"} for k in range(5)]
    assert len(Federation(net, (X, Y), (X, Y), groups=users, devices=3, run=RUN).shards) == 3
    with pytest.raises(DataError, match="groups has shape"):
        Federation(net, (X, Y), (X, Y), groups=users[:-1], run=RUN)
    with pytest.raises(DataError, match="groups names a column"):
        Federation(net, (X, Y), (X, Y), groups="user", run=RUN)
    with pytest.raises(DataError, match="groups apply to your own data only"):
        Federation(groups=users)


def test_a_data_set_is_accepted_unchanged(tmp_path):
    data = from_arrays("mine", (X, Y), (X, Y))
    assert (
        run(tmp_path / "a", train=data)["weights_sha256"]
        == run(tmp_path / "b", train=(X, Y), test=(X, Y))["weights_sha256"]
    )
    grouped = Federation(net, from_arrays("mine", (X, Y), (X, Y), groups=np.arange(40) // 10), run=RUN)
    assert [len(shard) for shard in grouped.shards] == [10] * 4
    with pytest.raises(DataError, match="leave test out"):
        Federation(net, data, (X, Y))


def test_shards_give_the_number_of_devices_and_come_in_any_form():
    masks = [np.arange(40) % 3 == k for k in range(3)]
    federation = Federation(net, (X, Y), (X, Y), shards=dict(enumerate(masks)), run=RUN)
    assert [shard.tolist() for shard in federation.shards] == [list(range(k, 40, 3)) for k in range(3)]
    with pytest.raises(ConfigError, match=r"one per device \(2\), but 3 were given"):
        Federation(net, (X, Y), (X, Y), shards=masks, devices=2, run={"per_round": 1})


def test_device_tests_are_sent_to_the_workers():
    own = [(X[k : k + 2] + 1, Y[k : k + 2]) for k in range(4)]
    by_number = Federation(net, (X, Y), (X, Y), devices=4, test_shards=[[k, k + 4] for k in range(4)], run=RUN)
    by_data = Federation(net, (X, Y), (X, Y), devices=4, test_shards=own, run=RUN)
    for federation, wanted in ((by_number, X[[2, 6]]), (by_data, own[2][0])):
        setup = federation.assembly.setup()
        tests = unpack_setup(*vars(pack_setup(setup)).values()).data.device_tests
        x, _ = tests.samples.take(torch.from_numpy(tests.shards[2]))
        np.testing.assert_array_equal(x.numpy(), wanted)
    assert Federation(net, (X, Y), (X, Y), devices=4, run=RUN).assembly.setup().data.device_tests is None


def test_lazy_rows_can_be_pickled():
    rows = from_arrays("t", Counted(X, Y), Counted(X, Y), lazy=True).x_train[[4, 2]]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(rows)).read(np.arange(2)), X[[4, 2]])


def test_torchvision_style_samples_with_pillow_images() -> None:
    class Images:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[Image.Image, int]:
            return Image.fromarray(np.full((5, 6, 3), i, np.uint8)), i % 2

    data = from_arrays("pictures", Images(), Images())
    assert data.x_train.shape == (4, 3, 5, 6)
    assert data.x_train[3].max() == 3
