"""Shards and device tests in every accepted form."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler

from freshet import Federation
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


# ---- DataLoaders


class Noted(torch.utils.data.Dataset):
    """Samples (row, row % 3) from ``start`` on."""

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int):
        row = self.start + place
        return torch.tensor([float(row), 1.0]), row % 3


def loader(start: int = 0, count: int = 30, **options) -> DataLoader:
    return DataLoader(Noted(start, count), **({"batch_size": 8, "shuffle": True} | options))


def rows(federation: Federation, device: int) -> list[float]:
    return federation.dataset.x_train[federation.shards[device]][:, 0].tolist()


def test_a_list_of_loaders_is_one_device_each():
    loaders = [loader(0, 30), loader(100, 20), loader(200, 25)]
    federation = Federation(nn.Linear(2, 3), loaders, loader(0, 30))
    assert [rows(federation, k) for k in range(3)] == [
        [*map(float, range(30))],
        [*map(float, range(100, 120))],
        [*map(float, range(200, 225))],
    ]
    assert federation.config.training.batch_size == 8 and federation.config.fleet.devices == 3
    given = Federation(nn.Linear(2, 3), loaders, loader(0, 30), training={"batch_size": 5})
    assert given.config.training.batch_size == 5


def test_a_sampler_of_some_samples_is_a_shard():
    picked = loader(0, 30, shuffle=False, sampler=SubsetRandomSampler([4, 9, 2]))
    federation = Federation(nn.Linear(2, 3), [picked, loader(100, 20)], loader(0, 30))
    assert rows(federation, 0) == [4.0, 9.0, 2.0]


def test_one_loader_is_dealt_over_the_devices(tmp_path):
    federation = Federation(nn.Linear(2, 3), loader(0, 60), loader(0, 30), devices=4, run={"executor": "serial"})
    assert sum(map(len, federation.shards)) == 60 and federation.config.training.batch_size == 8
    assert federation.run(20, out=tmp_path / "run").summary["status"] == "finished"


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


REFUSED_LOADERS = {
    "stream": (lambda: DataLoader(Stream()), "IterableDataset has no sample numbers"),
    "collate": (lambda: loader(collate_fn=list), "different functions collate_fn"),
    "weights": (
        lambda: loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 30, 30)),
        "WeightedRandomSampler is not used",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_LOADERS)
def test_what_a_loader_does_beyond_its_samples_is_refused(kind):
    make, text = REFUSED_LOADERS[kind]
    with pytest.raises(ConfigError, match=f"^train: .*{text}"):
        Federation(nn.Linear(2, 3), [make(), loader()], loader())


def test_a_function_gives_each_device_its_loader():
    made = Federation(nn.Linear(2, 3), test=loader(), devices=2, load=lambda device: loader(100 * device, 20 + device))
    listed = Federation(nn.Linear(2, 3), [loader(0, 20), loader(100, 21)], loader())
    assert [rows(made, device) for device in range(2)] == [rows(listed, device) for device in range(2)]
    assert list(map(len, made.shards)) == [20, 21]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"load": lambda device: loader()}, "gives each device its DataLoader; give devices, too"),
        ({"load": lambda device: loader(), "devices": 2, "train": [loader()]}, "takes the place of train; leave train"),
        ({"load": lambda device: [1, 2], "devices": 2}, "must return a DataLoader for each device, not list"),
        ({"load": lambda device: DataLoader(Stream()), "devices": 2}, "open the stream in your own trainer"),
    ],
)
def test_a_function_that_gives_no_loaders_is_one_sentence(given, said):
    with pytest.raises(ConfigError, match=f"^load: .*{said}"):
        Federation(nn.Linear(2, 3), test=loader(), **given)


def test_loaders_and_shards_exclude_each_other():
    with pytest.raises(ConfigError, match=r"^shards: are given by the list of DataLoaders"):
        Federation(nn.Linear(2, 3), [loader(), loader()], loader(), shards=[[0], [1]])


def with_names(samples):
    x, y = zip(*samples, strict=True)
    return {"input": torch.stack([torch.as_tensor(each) for each in x]), "y": torch.tensor([int(each) for each in y])}


def test_a_collate_function_of_all_loaders_makes_the_batches():
    loaders = [loader(collate_fn=with_names), loader(collate_fn=with_names)]
    made = Federation(nn.Linear(2, 3), loaders, loader(collate_fn=with_names))
    assert made.dataset.x_train.collate is with_names


def test_loaders_of_test_samples_for_each_device_are_refused():
    with pytest.raises(ConfigError, match=r"^test: takes one DataLoader; .* give test_shards"):
        Federation(nn.Linear(2, 3), [loader(), loader()], [loader(), loader()])
