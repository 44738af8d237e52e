"""Inputs and labels as tensors: which arrays are copied, and augmentation."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from freshet.data.dataset import from_arrays
from freshet.data.shards import as_shards
from freshet.training.batches import Samples, crop_flip, with_channels_last

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)
IMAGES = np.arange(6 * 4 * 4 * 3, dtype=np.uint8).reshape(6, 4, 4, 3).transpose(0, 3, 1, 2)
LABELS = np.arange(6) % 2


@pytest.fixture
def strict() -> Iterator[None]:
    """torch repeats its warnings, and a warning is an error."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(before)


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def samples(x: np.ndarray, y: np.ndarray) -> Samples:
    return Samples.of(with_channels_last(from_arrays("mine", (x, y), (x, y))), test=False)


def lies_in(tensor: torch.Tensor, array: np.ndarray) -> bool:
    return np.shares_memory(tensor.numpy(), array)


@pytest.mark.parametrize("x", [ROWS, np.ascontiguousarray(IMAGES)], ids=["rows", "images"])
def test_read_only_arrays_give_no_warning(x, strict):
    found, usual = samples(read_only(x), read_only(LABELS)), samples(x, LABELS)
    for one, two in zip(found.take(torch.arange(6)), usual.take(torch.arange(6)), strict=True):
        assert torch.equal(one, two)


def test_read_only_inputs_are_not_copied_but_read_only_labels_are(strict):
    found = samples(read_only(ROWS), read_only(LABELS))
    assert isinstance(found.x, torch.Tensor) and lies_in(found.x, ROWS)
    found.y.add_(1)
    assert LABELS.tolist() == [0, 1] * 3


def test_writable_arrays_are_not_copied():
    found = samples(ROWS, LABELS)
    assert isinstance(found.x, torch.Tensor) and lies_in(found.x, ROWS) and lies_in(found.y, LABELS)


def test_images_in_channels_last_order_are_not_copied(strict):
    dataset = from_arrays("mine", (np.ascontiguousarray(IMAGES), LABELS), (np.ascontiguousarray(IMAGES), LABELS))
    laid = with_channels_last(dataset)
    assert isinstance(laid.x_train, np.ndarray)
    laid.x_train.flags.writeable = False
    found = Samples.of(laid, test=False)
    assert isinstance(found.x, torch.Tensor) and lies_in(found.x, laid.x_train)


def test_pandas_data_give_no_warning(strict):
    pd = pytest.importorskip("pandas")
    found = samples(pd.DataFrame(ROWS), pd.Series(LABELS))
    assert torch.equal(found.take(torch.arange(6))[1], torch.from_numpy(LABELS))


def test_only_read_only_shards_are_copied(strict):
    mine = np.arange(3)
    first, second = as_shards([mine, read_only(mine)], 2, 6)
    assert np.shares_memory(first, mine) and not np.shares_memory(second, mine)
    assert torch.from_numpy(second).tolist() == [0, 1, 2]


# ---- augmentation


def images(dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (40, 3, 9, 7)).astype(dtype)


def by_hand(x: np.ndarray, rng: np.random.Generator, padding: int = 4) -> np.ndarray:
    """``crop_flip`` image by image."""
    rows, columns = (rng.integers(2 * padding + 1, size=len(x)) for _ in range(2))
    mirror = rng.integers(2, size=len(x)).astype(bool)
    wide = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    height, width = x.shape[2:]
    cut = [image[:, r : r + height, c : c + width] for image, r, c in zip(wide, rows, columns, strict=True)]
    return np.stack([image[..., ::-1] if flipped else image for image, flipped in zip(cut, mirror, strict=True)])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_crop_and_flip_equal_a_loop_over_images(dtype: type) -> None:
    x = torch.from_numpy(images(dtype))
    once, again, other = (crop_flip(x, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert once.dtype == x.dtype and once.shape == x.shape
    np.testing.assert_array_equal(once.numpy(), by_hand(images(dtype), np.random.default_rng(5)))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert torch.equal(x, torch.from_numpy(images(dtype)))  # the input is unchanged


def test_every_result_is_a_shifted_image_or_its_mirror_image() -> None:
    x = images()
    for before, after in zip(x, crop_flip(torch.from_numpy(x), np.random.default_rng(2), 2).numpy(), strict=True):
        wide = np.pad(before, ((0, 0), (2, 2), (2, 2)))
        shifts = [wide[:, r : r + 9, c : c + 7] for r in range(5) for c in range(5)]
        assert any(np.array_equal(after, s) or np.array_equal(after, s[..., ::-1]) for s in shifts)


def test_without_padding_an_image_is_only_mirrored_or_unchanged() -> None:
    x = torch.from_numpy(images())
    out = crop_flip(x, np.random.default_rng(0), padding=0)
    stayed = [torch.equal(a, b) for a, b in zip(x, out, strict=True)]
    mirrored = [torch.equal(a.flip(-1), b) for a, b in zip(x, out, strict=True)]
    assert all(a != b for a, b in zip(stayed, mirrored, strict=True)) and 5 < sum(stayed) < 35
    with pytest.raises(ValueError, match=r"\(N, C, H, W\)"):
        crop_flip(x[0], np.random.default_rng(0))
