"""Shards and device tests in every accepted form."""

import numpy as np
import pytest
import torch

from freshet.data import from_arrays
from freshet.data.shards import as_device_tests, as_shards
from freshet.errors import ConfigError, FreshetError

PARTS = [[0, 3], [1, 2, 5], [4]]
MASKS = np.array([[k in part for k in range(6)] for part in PARTS])

FORMS = {
    "lists": PARTS,
    "tuples": tuple(map(tuple, PARTS)),
    "arrays": [np.array(part, np.int32) for part in PARTS],
    "tensors": [torch.tensor(part) for part in PARTS],
    "sets": [set(part) for part in PARTS],
    "a dict": {2: PARTS[2], 0: PARTS[0], 1: PARTS[1]},
    "a dict with numpy keys": {np.int64(k): part for k, part in enumerate(PARTS)},
    "masks": list(MASKS),
    "masks as lists": MASKS.tolist(),
    "masks in one array": MASKS,
    "masks in one tensor": torch.tensor(MASKS),
    "a dict of masks": dict(enumerate(MASKS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_shards(form):
    shards = as_shards(FORMS[form], 3, 6)
    assert [shard.tolist() for shard in shards] == PARTS
    assert all(shard.dtype == np.int64 and shard.flags.c_contiguous for shard in shards)


def test_ranges_and_a_square_array_are_shards():
    assert [s.tolist() for s in as_shards([range(2), range(2, 6)], 2, 6)] == [[0, 1], [2, 3, 4, 5]]
    assert [s.tolist() for s in as_shards(np.arange(6).reshape(3, 2), 3, 6)] == [[0, 1], [2, 3], [4, 5]]


BAD = {
    "too few": (PARTS[:2], "one per device (3), but 2 were given"),
    "a dict without a device": ({0: [0], 2: [1]}, "device 1 has none"),
    "a dict with one too many": ({**dict(enumerate(PARTS)), 3: [0]}, "device 3 does not exist"),
    "a dict by name": ({"a": [0], "b": [1], "c": [2]}, "0..2, but 'a' was given"),
    "an empty shard": ([[0], [], [1]], "device 1 has no samples"),
    "an empty mask": ([[0], [False] * 6, [1]], "device 1 has no samples"),
    "a mask of another length": ([[True, False], [0], [1]], "a mask of 2 entries for 6 samples"),
    "a sample that is not there": ([[0], [6], [1]], "outside 0..5"),
    "a negative number": ([[0], [-1], [1]], "outside 0..5"),
    "floats": ([[0], [1.0], [1]], "device 1 must have a list of sample numbers or a boolean mask, but has float64"),
    "texts": ([[0], ["a"], [1]], "device 1 must have a list"),
    "nested": ([[0], [[1, 2]], [1]], "device 1 must have a list"),
    "ragged": ([[0], [[1], [2, 3]], [1]], "device 1 must have a list"),
    "numbers": ([0, 1, 2], "device 0 must have a list"),
    "a flat array": (np.arange(3), "a flat array was given"),
    "a number": (7, "but 7 was given"),
    "a string": ("abc", "'abc' was given"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_shards_give_one_sentence(case):
    given, says = BAD[case]
    with pytest.raises(ConfigError) as caught:
        as_shards(given, 3, 6)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def toy():
    x, y = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8) % 2
    return from_arrays("toy", (x, y), (x + 0.5, y))


def test_device_tests_can_be_sample_numbers():
    tests = as_device_tests([[0, 1], np.array([7])], 2, toy())
    assert tests.data is None
    assert [shard.tolist() for shard in tests.shards] == [[0, 1], [7]]


def test_device_tests_can_be_data():
    sides = [(np.full((n, 3), n, np.float32), np.zeros(n, int)) for n in (2, 3)]
    for given in (sides, dict(enumerate(sides))):
        tests = as_device_tests(given, 2, toy())
        x, y = tests.data
        assert [shard.tolist() for shard in tests.shards] == [[0, 1], [2, 3, 4]]
        assert x[:, 0].tolist() == [2, 2, 3, 3, 3]
        assert len(y) == 5
    torch_set = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.ones(4, dtype=torch.long))
    assert [len(s) for s in as_device_tests([torch_set, sides[0]], 2, toy()).shards] == [4, 2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([[0], [8]], "test_shards: device 1 names a sample outside 0..7"),
        ([[0]], "one per device (2), but 1"),
        ([(np.ones((2, 3)), np.zeros(2, int)), [1]], "device 1 has none"),
        ([(np.ones((2, 4)), np.zeros(2, int))] * 2, "test_shards: device 0: train samples are"),
        ([(np.ones((2, 3)), np.full(2, 5))] * 2, "device 0: test label 5 is out of range"),
        ([(np.full((2, 3), np.nan), np.zeros(2, int))] * 2, "device 0: test sample 0 holds NaN"),
    ],
)
def test_bad_device_tests_give_one_sentence(given, says):
    with pytest.raises(FreshetError) as caught:
        as_device_tests(given, 2, toy())
    assert says in str(caught.value)
