"""A setup as one small message and a few large blocks, so that workers can share the blocks.

It uses pickle's out-of-band buffers. The arrays and tensors of a ``Setup`` become views of memory that all workers of a
machine map, so each sample exists once.
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

from freshet.training.trainer import Setup

#: Smaller arrays travel inside the message.
INLINE_LIMIT_BYTES = 1 << 14
_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedSetup:
    """A pickled setup and the large blocks left out of it."""

    message: bytes
    blocks: list[NDArray[np.uint8]]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles lambdas and classes of ``__main__`` by value, and plain tensors as arrays with their memory format."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and not obj.requires_grad and obj.device.type == "cpu" and _is_plain(obj):
            order = sorted(range(obj.ndim), key=lambda axis: (-obj.stride()[axis], axis))
            dense = obj.permute(order)
            if dense.is_contiguous():
                half = obj.dtype is torch.bfloat16  # numpy has none
                array = (dense.view(torch.int16) if half else dense).numpy()
                return _tensor, (array, tuple(order.index(axis) for axis in range(obj.ndim)), half)
        return super().reducer_override(obj)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj()


def _tensor(array: NDArray[Any], axes: tuple[int, ...], half: bool = False) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only memory, but nothing writes to a setup
        tensor = torch.from_numpy(array)
    return (tensor.view(torch.bfloat16) if half else tensor).permute(axes)


def pack_setup(setup: Setup) -> PackedSetup:
    """Split a setup into a message and blocks, without copying a block."""
    blocks: list[NDArray[np.uint8]] = []

    def keep_out(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < INLINE_LIMIT_BYTES:
            return True
        blocks.append(np.frombuffer(raw, np.uint8))
        return False

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=keep_out).dump(setup)
    return PackedSetup(file.getvalue(), blocks)


def unpack_setup(message: bytes, blocks: list[Any]) -> Setup:
    """Rebuild a packed setup. Its arrays are views of ``blocks``."""
    setup: Setup = pickle.loads(message, buffers=blocks)  # noqa: S301  (from the parent process)
    return setup


class BlockFile:
    """Blocks in a file without a name. Processes pass its descriptor, and the system frees it with the last one."""

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
        weakref.finalize(self, os.close, self.descriptor)  # not while a thread sends it to a worker


def map_blocks(descriptor: int, spans: list[tuple[int, int]]) -> list[memoryview]:
    """Map the blocks of a ``BlockFile`` copy-on-write: torch wants writable memory, though nothing writes to it."""
    if not spans:
        return []
    view = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    return [view[start : start + size] for start, size in spans]
