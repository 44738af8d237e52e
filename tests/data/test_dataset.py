"""DataSet: checks of user data, validation split, subsets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.data import DataSet, check, from_arrays
from freshet.data.dataset import channel_statistics, stratified_indices
from freshet.errors import ConfigError, DataError


def toy(count: int = 100, classes: int = 5) -> DataSet:
    x = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    y = np.arange(count) % classes
    return from_arrays("toy", (x, y), (x[:10] + 0.5, y[:10]), groups=np.arange(count) // 10)


def test_arrays_tensors_and_torch_datasets_give_the_same() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 3
    pair = from_arrays("a", (x, y), (x, y))
    tensors = from_arrays("b", (torch.tensor(x), torch.tensor(y)), (torch.tensor(x), torch.tensor(y)))
    torch_set = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    torch_sets = from_arrays("c", torch_set, torch_set)
    for other in (tensors, torch_sets):
        assert np.array_equal(pair.x_train, other.x_train)
        assert np.array_equal(pair.y_test, other.y_test)
        assert other.x_train.dtype == np.float32
        assert other.y_train.dtype == np.int64
        assert other.classes == 3


def test_uint8_images_get_their_channel_statistics() -> None:
    x = np.random.default_rng(0).integers(0, 256, (30, 3, 8, 8), dtype=np.uint8)
    data = from_arrays("images", (x, np.arange(30) % 2), (x, np.arange(30) % 2))
    assert data.x_train.dtype == np.uint8
    assert data.mean is not None and data.std is not None
    np.testing.assert_allclose(data.mean, (x / 255).mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(data.std, (x / 255).std(axis=(0, 2, 3)))
    assert channel_statistics(np.zeros((2, 1, 4, 4), np.uint8)) == ((0.0,), (1.0,))


def test_integer_rows_become_token_ids() -> None:
    x = np.array([[1, 2, 0], [3, 0, 0]])
    data = from_arrays("text", (x, [0, 1]), (x, [0, 1]), pad_id=0)
    assert data.x_train.dtype == np.int32
    assert data.vocabulary == 4


X, Y = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("train", "test", "classes", "says"),
    [
        ((np.array([[1.0, np.nan]] * 4), Y), (X, Y), None, "sample 0 holds NaN or infinity"),
        ((np.array([[1.0, 1e300]] * 4), Y), (X, Y), None, "NaN or infinity"),
        ((X, Y), (X, np.array([0, 1, 0, 7])), 2, "label 7 is out of range; allowed: 0 to 1"),
        ((X, np.array([0, -1, 0, 1])), (X, Y), None, "label -1 is out of range"),
        ((X[:3], Y), (X, Y), None, "3 samples but 4 labels"),
        ((X[:0], Y[:0]), (X, Y), None, "train set is empty"),
        (([], []), (X, Y), None, "train set is empty"),
        ((X, Y), (X[:, :1], Y), None, "both must agree"),
        ((X, Y.astype(float)), (X, Y), 2, "train labels are float32 () but test labels are int64 ()"),
        (
            (X, np.eye(2, dtype=int)[Y]),
            (X, Y),
            None,
            "labels are int64 (); both must agree",
        ),
        ((np.array([["a"]] * 4), Y), (X, Y), None, "samples have type <U1"),
        ((X.astype(complex), Y), (X, Y), None, "complex128"),
        ((X > 0, Y), (X, Y), None, "bool"),
        ((X, np.zeros(4, int)), (X, np.zeros(4, int)), None, "nothing to learn"),
        (({"x": 1}, None), (X, Y), None, "train"),
        (3, (X, Y), None, "are a int; allowed: a pair"),
        ((np.zeros((4, 32, 32, 3), np.uint8), Y), (X, Y), None, "channels last; use transpose(0, 3, 1, 2)"),
        ((np.zeros((4, 32, 32), np.uint8), Y), (X, Y), None, "(samples, C, H, W)"),
        ((np.array([[-1, 2]] * 4), Y), (X, Y), None, "token ids run from -1"),
    ],
)
def test_bad_data_are_refused_in_one_sentence(train: object, test: object, classes: int | None, says: str) -> None:
    with pytest.raises(DataError) as caught:
        from_arrays("mine", train, test, classes)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message


def test_check_names_groups_and_statistics() -> None:
    data = toy()
    with pytest.raises(DataError, match="groups has shape"):
        check(DataSet("t", data.x_train, data.y_train, data.x_test, data.y_test, 5, groups=np.arange(3)))
    with pytest.raises(DataError, match="belong together"):
        check(DataSet("t", data.x_train, data.y_train, data.x_test, data.y_test, 5, mean=(0.5,)))
    with pytest.raises(DataError, match="class names"):
        check(DataSet("t", data.x_train, data.y_train, data.x_test, data.y_test, 5, ("a",)))


def test_validation_replaces_the_test_set() -> None:
    data = toy()
    split = check(data.with_validation(0.2, seed=3))
    assert len(split.y_test) == 20
    assert np.array_equal(np.bincount(split.y_test), [4] * 5)
    assert split.groups is not None and len(split.groups) == 80
    together = np.concatenate([split.x_train, split.x_test])
    assert np.array_equal(np.sort(together[:, 0]), data.x_train[:, 0])
    assert not np.isin(split.x_test[:, 0], data.x_test[:, 0]).any()
    assert np.array_equal(split.x_test, data.with_validation(0.2, seed=3).x_test)
    assert not np.array_equal(split.x_test, data.with_validation(0.2, seed=4).x_test)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1e-9, float("nan")])
def test_impossible_validation_share(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation"):
        toy().with_validation(fraction, seed=0)


def test_subset_is_stratified_and_bounded() -> None:
    data = toy()
    small = data.subset(train=20, test=5, seed=1)
    assert np.array_equal(np.bincount(small.y_train), [4] * 5)
    assert len(small.y_test) == 5
    assert len(data.subset(train=7).y_train) == 7
    for count in (0, 101):
        with pytest.raises(ConfigError, match=r"data\.train_samples"):
            data.subset(train=count)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=80), st.integers(0, 2**32), st.data())
def test_stratified_indices_have_the_requested_count(labels: list[int], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(labels)))
    y = np.array(labels)
    picked = stratified_indices(y, count, np.random.default_rng(seed))
    assert len(picked) == count == len(np.unique(picked))
    share = np.bincount(y, minlength=7) * count / len(y)
    assert (np.abs(np.bincount(y[picked], minlength=7) - share) < 1 + 1e-9).all()
