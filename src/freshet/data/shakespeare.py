"""Tiny Shakespeare by speaker: predict the next character of what one role says.

The text (A. Karpathy, char-rnn) holds speeches of the form ``SPEAKER:\\nlines``, with empty lines between them. A
client is a speaker with at least 2,000 characters; a name that occurs in several plays is one speaker. The first four
fifths of what a speaker says are for training, the rest for the test, as in McMahan et al., AISTATS 2017. Each part is
cut into windows of ``length`` characters; the targets are the same windows one character later.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from freshet.data.archives import as_data_errors, read_bounded
from freshet.data.catalogue import ReadOptions
from freshet.data.dataset import Array
from freshet.errors import ConfigError, DataError

#: Every character of the text. A token id is the place in this string.
ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#: Fewest characters of a speaker who is a client.
FEWEST = 2_000
_BREAK = re.compile(r"\n{2,}")
_TEXT_LIMIT = 1 << 23  # bytes; the text has 1.1 MB


def read_text(paths: tuple[Path, ...], options: ReadOptions) -> dict[str, Array]:
    """Read the text, plain or .xz, into windows of token ids with their speakers."""
    with as_data_errors(paths[0]):
        text = read_bounded(paths[0], _TEXT_LIMIT).decode("ascii")
    strange = set(text) - set(ALPHABET)
    if strange:
        raise DataError(f"{paths[0]} holds {min(strange)!r}, which is not in the text of Shakespeare; get it again")
    speakers = {name: said for name, said in lines_by_speaker(text).items() if len(said) >= FEWEST}
    if not speakers:
        raise DataError(f"{paths[0]} has no speaker with {FEWEST:,} characters; get it again")
    train = {name: windows(encode(said)[: len(said) * 4 // 5], options.length) for name, said in speakers.items()}
    test = {name: windows(encode(said)[len(said) * 4 // 5 :], options.length) for name, said in speakers.items()}
    if not all(len(x) for x, _ in train.values()) or not any(len(x) for x, _ in test.values()):
        raise ConfigError("data.length", f"{options.length} is longer than what a speaker says; choose 80, for example")
    return _side("train", train) | _side("test", test)


def lines_by_speaker(text: str) -> dict[str, str]:
    """All that each speaker says, in the order of the text; one newline joins two speeches."""
    said: dict[str, list[str]] = {}
    for speech in _BREAK.split(text.strip("\n")):
        speaker, _, lines = speech.partition("\n")
        if lines:
            said.setdefault(speaker.removesuffix(":"), []).append(lines)
    return {speaker: "\n".join(speeches) for speaker, speeches in said.items()}


def encode(text: str) -> Array:
    """The token ids of characters."""
    place = {character: i for i, character in enumerate(ALPHABET)}
    return np.array([place[character] for character in text], np.int64)


def windows(ids: Array, length: int) -> tuple[Array, Array]:
    """Whole windows, one after the other, and the same windows one character later. A shorter rest is left out."""
    count = max(0, (len(ids) - 1) // length)
    x, y = (ids[shift : shift + count * length].reshape(count, length) for shift in (0, 1))
    return x.astype(np.int32), y


def _side(side: str, parts: dict[str, tuple[Array, Array]]) -> dict[str, Array]:
    speaker = np.repeat(list(parts), [len(x) for x, _ in parts.values()])
    x, y = (np.concatenate(column) for column in zip(*parts.values(), strict=True))
    return {f"x_{side}": x, f"y_{side}": y, f"groups_{side}": speaker}
