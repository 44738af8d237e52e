"""Crop and flip."""

import numpy as np
import pytest
import torch

from freshet.training.batches import crop_flip


def images(dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (40, 3, 9, 7)).astype(dtype)


def by_hand(x: np.ndarray, rng: np.random.Generator, padding: int = 4) -> np.ndarray:
    """The same, image by image."""
    rows, columns = (rng.integers(2 * padding + 1, size=len(x)) for _ in range(2))
    mirror = rng.integers(2, size=len(x)).astype(bool)
    wide = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    height, width = x.shape[2:]
    cut = [image[:, r : r + height, c : c + width] for image, r, c in zip(wide, rows, columns, strict=True)]
    return np.stack([image[..., ::-1] if turned else image for image, turned in zip(cut, mirror, strict=True)])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_pixels_are_those_of_the_plain_loop(dtype: type) -> None:
    x = torch.from_numpy(images(dtype))
    once, again, other = (crop_flip(x, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert once.dtype == x.dtype and once.shape == x.shape
    np.testing.assert_array_equal(once.numpy(), by_hand(images(dtype), np.random.default_rng(5)))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert torch.equal(x, torch.from_numpy(images(dtype)))  # the batch itself is left alone


def test_every_result_is_a_shift_or_its_mirror() -> None:
    x = images()
    for before, after in zip(x, crop_flip(torch.from_numpy(x), np.random.default_rng(2), 2).numpy(), strict=True):
        wide = np.pad(before, ((0, 0), (2, 2), (2, 2)))
        shifts = [wide[:, r : r + 9, c : c + 7] for r in range(5) for c in range(5)]
        assert any(np.array_equal(after, s) or np.array_equal(after, s[..., ::-1]) for s in shifts)


def test_without_padding_an_image_stays_or_is_mirrored() -> None:
    x = torch.from_numpy(images())
    out = crop_flip(x, np.random.default_rng(0), padding=0)
    stayed = [torch.equal(a, b) for a, b in zip(x, out, strict=True)]
    mirrored = [torch.equal(a.flip(-1), b) for a, b in zip(x, out, strict=True)]
    assert all(a != b for a, b in zip(stayed, mirrored, strict=True)) and 5 < sum(stayed) < 35
    with pytest.raises(ValueError, match=r"\(N, C, H, W\)"):
        crop_flip(x[0], np.random.default_rng(0))
