"""Keyed random streams: the same (seed, purpose, keys) gives the same numbers, whoever asks and in whatever order."""

from functools import cached_property
from typing import Any
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
    stream that is asked for: draw from it before the next one is.

    The first ones are made one by one: that is sooner done than the compiled code is loaded, and workers wait for them.
    """

    def __init__(self, seed: int, purpose: str, one_by_one: int = 1000) -> None:
        self._root, self._one_by_one = (seed, purpose), one_by_one

    def __call__(self, device: int, trip: int) -> np.random.Generator:
        if self._one_by_one:
            self._one_by_one -= 1
            return stream(*self._root, device, trip)
        write_key, pool, multiplier, beginning = self._compiled
        write_key(beginning["state"]["key"], pool, multiplier, device, trip)
        self._generator.bit_generator.state = beginning
        return self._generator

    @cached_property
    def _generator(self) -> np.random.Generator:
        return stream(*self._root)

    @cached_property
    def _compiled(self) -> tuple[Any, ...]:
        """What hashes a key; what the streams have in common, hashed; the generator's state at a beginning."""
        from freshet.core import seeding

        words = max(seeding.POOL, -(-self._root[0].bit_length() // 32)) + 1
        pool, multiplier = _sequence(*self._root).pool, seeding.multiplier(words)
        return seeding.write_key, pool, multiplier, self._generator.bit_generator.state


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """A seed for ``torch.manual_seed`` (weights at the start, dropout), keyed in the same way."""
    return int(stream(seed, purpose, *keys).integers(2**63 - 1))
