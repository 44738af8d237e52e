"""A federation's fixed part as one small message and a few large blocks, so that workers can share the blocks.

Pickle's out-of-band buffers do the work: whatever a ``Setup`` is made of, its arrays and tensors become views of memory
that all workers of a machine map, and each sample exists once.
"""

import io
import mmap
import os
import pickle
import tempfile
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshet.compute.executor import Setup

#: Arrays below this many bytes travel inside the message.
SMALL = 1 << 14
_ALIGNMENT = 64


@dataclass(frozen=True)
class Parts:
    """A pickled setup and the large blocks that were left out of it."""

    message: bytes
    blocks: list[NDArray[np.uint8]]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles lambdas and classes of ``__main__`` by value, and plain tensors as arrays, memory format included."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and not obj.requires_grad and obj.device.type == "cpu" and _is_plain(obj):
            order = sorted(range(obj.ndim), key=lambda axis: (-obj.stride()[axis], axis))
            dense = obj.permute(order)
            if dense.is_contiguous():
                return _tensor, (dense.numpy(), tuple(order.index(axis) for axis in range(obj.ndim)))
        return super().reducer_override(obj)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype is not torch.bfloat16 and not tensor.is_conj()


def _tensor(array: NDArray[Any], axes: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only memory; nobody writes to a setup
        return torch.from_numpy(array).permute(axes)


def dismantle(setup: Setup) -> Parts:
    """Split a setup into its message and its blocks (no block is copied)."""
    blocks: list[NDArray[np.uint8]] = []

    def keep_out(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SMALL:
            return True
        blocks.append(np.frombuffer(raw, np.uint8))
        return False

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=keep_out).dump(setup)
    return Parts(file.getvalue(), blocks)


def assemble(message: bytes, blocks: list[Any]) -> Setup:
    """The inverse of ``dismantle``: the setup's arrays are views of the blocks given."""
    setup: Setup = pickle.loads(message, buffers=blocks)  # noqa: S301  (from our own parent process)
    return setup


class BlockFile:
    """Blocks in a file without a name: other processes get its descriptor, and nothing is left behind, whoever dies."""

    def __init__(self, blocks: list[NDArray[np.uint8]]) -> None:
        self.spans: list[tuple[int, int]] = []
        with tempfile.TemporaryFile(prefix="freshet-") as file:
            for block in blocks:
                start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                file.seek(start)
                file.write(block.data)
                self.spans.append((start, block.nbytes))
            file.flush()
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)  # not while a thread is sending it to a worker


def mapped(descriptor: int, spans: list[tuple[int, int]]) -> list[memoryview]:
    """The blocks of a ``BlockFile``, mapped copy-on-write: torch wants writable memory, and nobody writes."""
    if not spans:
        return []
    view = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    return [view[start : start + size] for start, size in spans]
