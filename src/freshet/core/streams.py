"""Keyed random streams: the same (seed, purpose, keys) gives the same numbers, whatever the order of calls."""

from zlib import crc32

import numpy as np


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """An independent generator for one purpose, for example ``stream(seed, "batches", device, trip)``."""
    sequence = np.random.SeedSequence(seed, spawn_key=(crc32(purpose.encode()), *keys))
    return np.random.Generator(np.random.Philox(sequence))


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """A seed for ``torch.manual_seed`` (initial weights, dropout), keyed in the same way."""
    return int(stream(seed, purpose, *keys).integers(2**63 - 1))
