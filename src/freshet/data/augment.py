"""The standard augmentation of small images: random crop after padding, and horizontal flip. Off by default."""

import numpy as np
import torch
from torch import Tensor


def crop_flip(x: Tensor, rng: np.random.Generator, padding: int = 4) -> Tensor:
    """A new batch (N, C, H, W): each image shifted by up to ``padding`` pixels (zeros come in), half of them mirrored.

    All draws come from ``rng`` in a fixed order: rows, columns, mirror.
    """
    if x.ndim != 4:
        raise ValueError(f"a batch of images has shape (N, C, H, W), not {tuple(x.shape)}")
    count, (height, width) = len(x), x.shape[2:]
    rows, columns = (rng.integers(2 * padding + 1, size=count) for _ in range(2))
    mirror = rng.integers(2, size=count).astype(bool)
    wide = x.new_zeros((*x.shape[:2], height + 2 * padding, width + 2 * padding))
    wide[:, :, padding : padding + height, padding : padding + width] = x
    windows = wide.unfold(2, height, 1).unfold(3, width, 1)
    image, row, column, mirrored = (
        torch.as_tensor(v, device=x.device) for v in (np.arange(count), rows, columns, mirror)
    )
    out = windows[image, :, row, column].contiguous()
    return torch.where(mirrored.view(-1, 1, 1, 1), out.flip(-1), out)
