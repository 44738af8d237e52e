"""Crop and flip."""

import numpy as np
import pytest
import torch

from freshet.data.augment import crop_flip


def images(dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (40, 3, 9, 7)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_arrays_and_tensors_get_the_same_pixels(dtype: type) -> None:
    x = images(dtype)
    a = crop_flip(x, np.random.default_rng(5))
    b = crop_flip(torch.from_numpy(x), np.random.default_rng(5))
    assert a.dtype == x.dtype and a.shape == x.shape
    assert np.array_equal(a, b.numpy())
    assert np.array_equal(a, crop_flip(x, np.random.default_rng(5)))
    assert not np.array_equal(a, crop_flip(x, np.random.default_rng(6)))


def test_a_torch_generator_serves_too() -> None:
    x = torch.from_numpy(images())
    one, two = (crop_flip(x, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(x, torch.from_numpy(images()))  # the batch itself is left alone


def test_every_result_is_a_shift_or_its_mirror() -> None:
    x = images()
    for before, after in zip(x, crop_flip(x, np.random.default_rng(2), padding=2), strict=True):
        wide = np.pad(before, ((0, 0), (2, 2), (2, 2)))
        shifts = [wide[:, r : r + 9, c : c + 7] for r in range(5) for c in range(5)]
        assert any(np.array_equal(after, s) or np.array_equal(after, s[..., ::-1]) for s in shifts)


def test_without_padding_and_flip_nothing_changes() -> None:
    x = images()
    assert np.array_equal(crop_flip(x, np.random.default_rng(0), padding=0, flip=False), x)
    with pytest.raises(ValueError, match=r"\(N, C, H, W\)"):
        crop_flip(x[0], np.random.default_rng(0))
