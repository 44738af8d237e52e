"""The standard augmentation of small images: random crop after padding, and horizontal flip. Off by default."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

Batch = TypeVar("Batch", np.ndarray[Any, Any], torch.Tensor)


def crop_flip(
    batch: Batch, rng: np.random.Generator | torch.Generator, padding: int = 4, flip: bool = True, fill: float = 0.0
) -> Batch:
    """A new batch: each image shifted by up to ``padding`` pixels (``fill`` comes in) and mirrored half of the time.

    Takes (N, C, H, W) as array or tensor, of any type; all draws come from ``rng`` in a fixed order (rows, columns,
    mirror), so the same generator state gives the same pixels for either kind of batch.
    """
    if batch.ndim != 4:
        raise ValueError(f"a batch of images has shape (N, C, H, W), not {tuple(batch.shape)}")
    rows, columns, mirror = _draws(len(batch), padding, flip, rng)
    if isinstance(batch, torch.Tensor):
        return _crop_tensor(batch, rows, columns, mirror, padding, fill)
    return _crop_array(batch, rows, columns, mirror, padding, fill)


_Ints = np.ndarray[Any, Any]


def _draws(count: int, padding: int, flip: bool, rng: np.random.Generator | torch.Generator) -> tuple[_Ints, ...]:
    span = 2 * padding + 1
    if isinstance(rng, torch.Generator):
        device = rng.device
        rows = torch.randint(span, (count,), generator=rng, device=device).cpu().numpy()
        columns = torch.randint(span, (count,), generator=rng, device=device).cpu().numpy()
        mirror = torch.randint(2, (count,), generator=rng, device=device).cpu().numpy().astype(bool)
    else:
        rows, columns = rng.integers(span, size=count), rng.integers(span, size=count)
        mirror = rng.integers(2, size=count).astype(bool)
    return rows, columns, mirror & flip


def _crop_array(x: _Ints, rows: _Ints, columns: _Ints, mirror: _Ints, padding: int, fill: float) -> _Ints:
    height, width = x.shape[2:]
    edge = (padding, padding)
    wide = np.pad(x, ((0, 0), (0, 0), edge, edge), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(wide, (height, width), axis=(2, 3))
    out: _Ints = np.ascontiguousarray(windows[np.arange(len(x)), :, rows, columns])
    out[mirror] = out[mirror][..., ::-1]
    return out


def _crop_tensor(
    x: torch.Tensor, rows: _Ints, columns: _Ints, mirror: _Ints, padding: int, fill: float
) -> torch.Tensor:
    height, width = x.shape[2:]
    wide = x.new_full((*x.shape[:2], height + 2 * padding, width + 2 * padding), fill)
    wide[:, :, padding : padding + height, padding : padding + width] = x
    windows = wide.unfold(2, height, 1).unfold(3, width, 1)
    pick = [torch.as_tensor(v, device=x.device) for v in (np.arange(len(x)), rows, columns, mirror)]
    out = windows[pick[0], :, pick[1], pick[2]].contiguous()
    return torch.where(pick[3].view(-1, 1, 1, 1), out.flip(-1), out)
