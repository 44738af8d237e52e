"""Samples of any form: compact storage, padded batches, and the parts of a batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from freshet.data.dataset import from_arrays
from freshet.data.samples import (
    Columns,
    Items,
    Records,
    as_records,
    flatten,
    form_of,
    needs_records,
    read_columns,
    rebuild,
)
from freshet.errors import DataError


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, count)
    return [{"ids": rng.integers(0, 30_000, n).tolist(), "label": int(n) % 3} for n in lengths]


def records(samples: Any, **given: Any) -> Records:
    return as_records("t: train", samples, given.pop("collate", None), split=given.pop("split", True), **given)


# ---- the form of a sample

SAMPLES = [
    3,
    [1, 2, 3],
    [[1, 2], [3, 4]],
    (1.0, 2),
    {"a": 1, "b": (2, {"c": 3})},
    ({"ids": [1, 2], "mask": [1, 1]}, 0),
    ["text", 4],
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_flatten_and_rebuild_are_inverse(sample: Any) -> None:
    form = form_of(sample)
    entries = flatten(sample, form)
    assert rebuild(form, entries) == (tuple(sample) if sample == ["text", 4] else sample)


def test_a_list_of_numbers_is_one_entry_and_a_tuple_has_parts() -> None:
    assert form_of([1, 2, 3]) == 0 and form_of((1, 2, 3)) == (0, 1, 2)


# ---- storage


def test_variable_lengths_take_the_memory_of_their_numbers() -> None:
    samples = texts(500)
    store = read_columns("t", samples)
    ids, label = store.columns
    assert ids.values.nbytes == 2 * sum(len(sample["ids"]) for sample in samples)  # ids below 32,768: 2 bytes each
    assert label.values.nbytes == 500 and label.offsets is None
    assert store.samples(np.array([7, 3])) == [samples[7], samples[3]]


@pytest.mark.parametrize(
    ("entry", "batch"),
    [
        (True, np.bool_),
        (7, np.int64),
        (0.5, np.float32),
        (np.arange(3, dtype=np.uint8), np.uint8),
        (np.arange(3), np.int64),
        (torch.arange(3), np.int64),
        (torch.ones(2, 3, dtype=torch.bfloat16), np.float32),
        (np.ones((2, 2)), np.float32),
        ([1, 2], np.int64),
        ([], np.int64),
    ],
    ids=str,
)
def test_entries_keep_their_kind(entry: Any, batch: Any) -> None:
    store = read_columns("t", [{"a": entry}] * 3)
    found = store.samples(np.array([1]))[0]["a"]
    if isinstance(entry, torch.Tensor):
        assert isinstance(found, torch.Tensor) and torch.equal(found, entry.to(found.dtype))
    elif not isinstance(entry, bool):
        assert type(found) is type(entry) and np.array_equal(found, entry)
    made = store.batch(np.array([0, 2]))["a"]
    assert made.shape == (2, *np.shape(found)) and (isinstance(entry, bool) or made.dtype == batch)


def test_a_padded_batch_equals_the_textbook_one() -> None:
    samples = texts(40)
    made = read_columns("t", samples).batch(np.array([5, 1, 30]))
    twin = pad_sequence([torch.tensor(samples[k]["ids"]) for k in (5, 1, 30)], batch_first=True)
    assert np.array_equal(made["ids"], twin.numpy()) and made["ids"].dtype == np.int64
    assert np.array_equal(made["label"], [samples[k]["label"] for k in (5, 1, 30)])


def test_series_of_vectors_are_padded_along_time() -> None:
    series = [torch.randn(n, 4) for n in (2, 5, 1)]
    made = read_columns("t", series).batch(np.arange(3))
    assert np.array_equal(made, pad_sequence(series, batch_first=True).numpy())


def test_labels_are_padded_with_the_value_that_losses_ignore() -> None:
    rows = [{"input_ids": [4, 5, 6], "labels": [4, 5, 6]}, {"input_ids": [7], "labels": [7]}]
    made = read_columns("t", rows).batch(np.arange(2))
    assert made["labels"].tolist() == [[4, 5, 6], [7, -100, -100]]
    assert made["input_ids"].tolist() == [[4, 5, 6], [7, 0, 0]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_an_attention_mask_of_the_user_stays() -> None:
    rows = [{"input_ids": [4, 5], "attention_mask": [0, 1]}, {"input_ids": [7], "attention_mask": [1]}]
    assert read_columns("t", rows).batch(np.arange(2))["attention_mask"].tolist() == [[0, 1], [1, 0]]


# ---- batches


def test_a_selection_reads_the_samples_that_it_names() -> None:
    samples = texts(20)
    part = records(samples)[np.array([3, 9, 11])]
    assert len(part) == 3 and part.labels().tolist() == [samples[k]["label"] for k in (3, 9, 11)]
    assert np.array_equal(part.batch(np.array([2]))["ids"][0], samples[11]["ids"])


def test_collate_gets_the_samples_as_they_were_given() -> None:
    seen: list[Any] = []
    made = records(texts(10), collate=lambda batch: seen.append(batch) or len(batch))
    assert made.batch(np.array([4, 2])) == 2 and seen == [[texts(10)[4], texts(10)[2]]]


def test_samples_that_are_no_numbers_stay_as_they_are() -> None:
    rows = [{"text": "a b", "label": 0}, {"text": "c", "label": 1}]
    made = records(rows, collate=lambda batch: [sample["text"] for sample in batch])
    assert isinstance(made.store, Items) and made.batch(np.array([1, 0])) == ["c", "a b"]
    assert made.labels().tolist() == [0, 1]
    images = [{"x": np.ones((2, 3)), "label": 0}, {"x": np.ones((4, 5)), "label": 1}]
    assert isinstance(records(images, collate=len).store, Items)


def test_samples_read_lazily_make_the_same_batches() -> None:
    here, lazy = records(texts(30)), records(texts(30), lazy=True)
    assert isinstance(here.store, Columns) and isinstance(lazy.store, Items)
    rows = np.array([8, 2, 19])
    for name in ("ids", "label"):
        assert np.array_equal(here.batch(rows)[name], lazy.batch(rows)[name])
    assert np.array_equal(here.labels(), lazy.labels())


@pytest.mark.parametrize(
    ("batch", "split", "x", "y"),
    [
        ((1, 2), True, 1, 2),
        ((1, 2), False, 1, 2),
        ((1, 2, 3), True, (1, 2), 3),
        ((1, 2, 3), False, (1, 2, 3), (1, 2, 3)),
        ({"a": 1, "labels": 2}, True, 1, 2),
        ({"a": 1, "b": 5, "label": 2}, True, {"a": 1, "b": 5}, 2),
        ({"a": 1, "label": 2}, False, {"a": 1, "label": 2}, {"a": 1, "label": 2}),
        ({"a": 1}, True, {"a": 1}, {"a": 1}),
        (7, True, 7, 7),
    ],
)
def test_the_parts_of_a_batch(batch: Any, split: bool, x: Any, y: Any) -> None:
    assert records([1, 2, 3], split=split).parts(batch) == (x, y)


def test_the_target_may_have_any_name() -> None:
    rows = [{"a": [1.0], "stars": 2}, {"a": [2.0], "stars": 0}]
    named = records(rows, target="stars")
    assert named.labels().tolist() == [2, 0] and named.parts({"a": 1, "stars": 2}) == (1, 2)
    assert records(rows).labels().shape == (2, 0)


# ---- what counts as samples


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ((np.ones((4, 2)), np.ones(4)), False),
        ([np.ones((4, 2)), np.ones(4)], False),
        ([(np.ones(2), 1)] * 3, False),
        ([{"a": 1}] * 3, True),
        ([{"a": 1}] * 2, True),
        ([(1, 2, 3)] * 3, True),
        ([((1, 2), 3)] * 3, True),
        ([({"a": 1}, 3)] * 3, True),
        (torch.ones(5, 2), True),
        ([[1, 2, 3], [4]] * 2, True),
        ("text", False),
        ({"a": [1]}, False),
    ],
)
def test_which_data_become_records(given: Any, needed: bool) -> None:
    assert needs_records(given) is needed


def test_taking_in_a_dataset_draws_nothing_from_the_global_generators() -> None:
    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            return torch.rand(2), row % 2

    torch.manual_seed(3)
    next_draw = torch.rand(2)
    torch.manual_seed(3)
    from_arrays("t", Noisy(), Noisy())
    assert torch.equal(torch.rand(2), next_draw)


def test_a_loader_gives_its_dataset_and_its_collate() -> None:
    pairs = [(torch.ones(n % 3 + 1), n % 2) for n in range(12)]
    made = DataLoader(pairs, batch_size=99, collate_fn=lambda batch: (pad_sequence([x for x, _ in batch]), 0))
    data = from_arrays("t", made, made)
    assert isinstance(data.x_train, Records) and data.x_train.collate is made.collate_fn
    assert data.y_train.tolist() == [n % 2 for n in range(12)] and data.classes == 2
    plain = from_arrays("t", *[DataLoader([(torch.ones(2), n % 2) for n in range(12)])] * 2)
    assert isinstance(plain.x_train, np.ndarray) and plain.x_train.shape == (12, 2)


def test_subsets_and_validation_keep_samples_and_labels_together() -> None:
    data = from_arrays("t", texts(200), texts(60, 1))
    for part in (data.subset(train=50, test=20), data.with_validation(0.2, 0)):
        for x, y in ((part.x_train, part.y_train), (part.x_test, part.y_test)):
            assert np.array_equal(x.batch(np.arange(len(x)))["label"], y)


def test_samples_without_labels_have_empty_targets() -> None:
    data = from_arrays("t", torch.ones(6, 2), torch.ones(4, 2))
    assert data.y_train.shape == (6, 0) and not data.has_classes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"a": "x"}] * 3, "entry 'a' of a sample is a str, not numbers; convert it first, or give collate="),
        ([{"a": 1}, {"b": 1}, {"a": 1}], "sample 1 has b where others have a"),
        ([{"a": np.ones((1, 2))}, {"a": np.ones((1, 3))}, {"a": 1}], "only the first dimension may vary"),
        ([{"a": 1.0}, {"a": float("nan")}, {"a": 1.0}], "'a' of a sample holds NaN or infinity"),
        ([(torch.ones(2), 0), (torch.ones(3), 1), (torch.ones(2), 0)], "differ in shape; all must have the same shape"),
    ],
)
def test_bad_samples_are_one_sentence(given: Any, says: str) -> None:
    with pytest.raises(DataError) as caught:
        from_arrays("mine", given, given)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_pair_of_variable_lengths_is_padded_on_request() -> None:
    pairs = [(torch.ones(n % 3 + 1), n % 2) for n in range(6)]
    data = from_arrays("t", pairs, pairs, collate="pad")
    x, y = data.x_train.parts(data.x_train.batch(np.array([0, 2])))
    assert x.tolist() == [[1, 0, 0], [1, 1, 1]] and y.tolist() == [0, 0]
    with pytest.raises(DataError, match='collate must be "pad" or a function'):
        from_arrays("t", pairs, pairs, collate="fold")
