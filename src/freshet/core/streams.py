"""Keyed random streams: the same (seed, purpose, keys) gives the same numbers, whoever asks and in whatever order."""

from zlib import crc32

import numpy as np


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """An independent generator for one purpose, for example ``stream(seed, "batches", device, trip)``."""
    return np.random.Generator(np.random.Philox(_sequence(seed, purpose, *keys)))


def _sequence(seed: int, purpose: str, *keys: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(crc32(purpose.encode()), *keys))


class Streams:
    """Very many streams of one purpose, each of a device and a trip: the numbers are those of ``stream``, in a tenth of
    the time. What they have in common is hashed once, and there is one generator, which is put to the beginning of the
    stream that is asked for: draw from it before the next one is."""

    def __init__(self, seed: int, purpose: str) -> None:
        from freshet.core import seeding

        words = max(seeding.POOL, -(-seed.bit_length() // 32)) + 1
        self._pool, self._multiplier = _sequence(seed, purpose).pool, seeding.multiplier(words)
        self._write_key = seeding.write_key
        self._generator = stream(seed, purpose)
        self._beginning = self._generator.bit_generator.state

    def __call__(self, device: int, trip: int) -> np.random.Generator:
        self._write_key(self._beginning["state"]["key"], self._pool, self._multiplier, device, trip)
        self._generator.bit_generator.state = self._beginning
        return self._generator


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """A seed for ``torch.manual_seed`` (weights at the start, dropout), keyed in the same way."""
    return int(stream(seed, purpose, *keys).integers(2**63 - 1))
