"""The key of a Philox stream, compiled: what ``np.random.SeedSequence`` makes of a root and two further numbers.

The algorithm is M. E. O'Neill's ``seed_seq_fe`` as numpy has it and guarantees it: words of 32 bits are hashed into a
pool of four, with a multiplier that changes at every hash.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from freshet.core.compiling import compiled, inlined

Words = NDArray[np.uint32]
WORDS = types.Array(types.uint32, 1, "C")
KEY = types.Array(types.uint64, 1, "C")
POOL, SHIFT = 4, np.uint32(16)
FIRST_A, TIMES_A = np.uint32(0x43B0D7E5), np.uint32(0x931E8875)
FIRST_B, TIMES_B = np.uint32(0x8B51F9DD), np.uint32(0x58F38DED)
LEFT, RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)


def multiplier(words: int) -> int:
    """The hash's multiplier once so many words are in the pool: one hash for each of the first four, twelve to mix
    those with each other, four for every further word."""
    hashes = 16 + POOL * (words - POOL)
    return int(FIRST_A) * pow(int(TIMES_A), hashes, 2**32) % 2**32


@inlined
def _hashed(word: np.uint32, now: np.uint32, after: np.uint32) -> np.uint32:
    mixed = np.uint32(np.uint32(word ^ now) * after)
    return np.uint32(mixed ^ (mixed >> SHIFT))


@compiled(types.void(KEY, WORDS, types.int64, types.int64, types.int64))
def write_key(key: NDArray[np.uint64], pool: Words, multiplier: int, first: int, second: int) -> None:
    """The key of the stream whose root is hashed in the pool, with two further words."""
    mine, now = pool.copy(), np.uint32(multiplier)
    for word in (np.uint32(first), np.uint32(second)):
        for i in range(POOL):
            after = np.uint32(now * TIMES_A)
            both = np.uint32(np.uint32(LEFT * mine[i]) - np.uint32(RIGHT * _hashed(word, now, after)))
            mine[i] = both ^ (both >> SHIFT)
            now = after
    now = FIRST_B
    for i in range(POOL):
        after = np.uint32(now * TIMES_B)
        mine[i] = _hashed(mine[i], now, after)
        now = after
    for i in range(2):
        key[i] = np.uint64(mine[2 * i]) | (np.uint64(mine[2 * i + 1]) << np.uint64(32))
