"""A setup as message and blocks: same values, same memory layout, and only small arrays in the message."""

import os

import numpy as np
import pytest
import torch

from freshet.compute.share import BlockFile, map_blocks, pack_setup, unpack_setup
from freshet.training.batches import FederatedData, Samples
from freshet.training.network import as_factory
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Setup

from .helpers import linear, make_setup


def through_a_file(setup: Setup) -> Setup:
    packed = pack_setup(setup)
    file = BlockFile(packed.blocks)
    return unpack_setup(packed.message, map_blocks(file.descriptor, file.spans))


def big_setup() -> Setup:
    x = torch.arange(600 * 3 * 8 * 8, dtype=torch.float32).view(600, 3, 8, 8).to(memory_format=torch.channels_last)
    mean = torch.ones(1, 3, 1, 1)
    train = Samples(x, torch.arange(600), mean, mean)
    test = Samples(torch.arange(60_000, dtype=torch.uint8).view(100, 600), torch.arange(100), None, None)
    shards = [np.arange(100), np.arange(100, 600)]
    return Setup(linear, FederatedData(train, test, shards), TrainingOptions(), 3)


def test_a_setup_survives_packing_and_unpacking():
    setup = big_setup()
    again = through_a_file(setup)
    assert (again.seed, again.training, again.factory) == (3, setup.training, linear)
    for before, after in ((setup.data.train, again.data.train), (setup.data.test, again.data.test)):
        assert torch.equal(before.x, after.x)
        assert before.x.stride() == after.x.stride()
        assert torch.equal(before.y, after.y)
    assert torch.equal(again.data.train.mean, setup.data.train.mean)
    assert all(np.array_equal(a, b) for a, b in zip(again.data.shards, setup.data.shards, strict=True))


def test_large_arrays_stay_out_of_the_message():
    setup = big_setup()
    large = [setup.data.train.x, setup.data.test.x]
    packed = pack_setup(setup)
    assert sorted(block.nbytes for block in packed.blocks) == sorted(tensor.nbytes for tensor in large)
    assert len(packed.message) < 20_000


def test_arrays_captured_by_a_factory_are_shared_too():
    ballast = np.zeros(1_000_000)
    packed = pack_setup(make_setup(lambda: linear() if len(ballast) else None))
    assert len(packed.message) < 20_000
    assert [block.nbytes for block in packed.blocks] == [8_000_000]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_workers_share_a_frozen_base(kind: torch.dtype):
    base = torch.nn.Linear(500, 400).to(kind).requires_grad_(False)
    model = torch.nn.Sequential(base, torch.nn.Linear(400, 2))
    packed = pack_setup(make_setup(as_factory(model)))
    assert len(packed.message) < 50_000
    file = BlockFile(packed.blocks)
    views = map_blocks(file.descriptor, file.spans)
    setup = unpack_setup(packed.message, views)
    copies = [setup.factory()[0].weight for _ in range(2)]
    places = {np.frombuffer(view, np.uint8).ctypes.data for view in views}
    assert {copy.data_ptr() for copy in copies} <= places
    assert all(torch.equal(copy, base.weight) and copy.dtype is kind for copy in copies)


def test_a_worker_cannot_change_what_others_see():
    packed = pack_setup(big_setup())
    file = BlockFile(packed.blocks)
    one, other = (unpack_setup(packed.message, map_blocks(file.descriptor, file.spans)) for _ in range(2))
    one.data.train.x.zero_()
    assert torch.equal(other.data.train.x, big_setup().data.train.x)


def test_the_file_has_no_name_and_its_descriptor_is_closed_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = BlockFile([np.zeros(100_000, np.uint8)])
    assert list(tmp_path.iterdir()) == []
    descriptor = file.descriptor
    assert os.fstat(descriptor).st_size == 100_000
    del file
    try:
        os.fstat(descriptor)
    except OSError:
        return
    raise AssertionError("the descriptor is still open")
