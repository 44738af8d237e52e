"""IMDb reviews from either format, a small tokeniser, and token ids of fixed length."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from freshet.data.archives import as_data_errors, members, read_bounded
from freshet.data.catalogue import ReadOptions
from freshet.data.dataset import Array
from freshet.errors import ConfigError, DataError

PAD, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
_BREAK = re.compile(r"<br\s*/?>")
_REVIEW = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/(\d+)_\d+\.txt")
_TEXT_LIMIT = 1 << 28  # bytes; all 50,000 reviews are 66 MB
_REVIEW_LIMIT = 1 << 20
_STARS_LIMIT = 1 << 22  # bytes; 50,000 ratings are 50 kB


@dataclass(frozen=True)
class Reviews:
    """Texts and labels (0 negative, 1 positive), each split ordered negative first, then by the official number."""

    train: list[str]
    y_train: Array
    test: list[str]
    y_test: Array


def read_official(paths: tuple[Path, ...], options: ReadOptions) -> dict[str, Array]:
    """Read the official archive aclImdb, or its unpacked folder, without the unlabelled reviews."""
    return as_arrays(_official_reviews(paths[0]), options)


def read_compact(paths: tuple[Path, ...], options: ReadOptions) -> dict[str, Array]:
    """Read one review per line of an .xz file, in four equal parts, and the ratings of a .npy file."""
    return as_arrays(compact_reviews(paths), options)


def _official_reviews(path: Path) -> Reviews:
    found: list[tuple[str, int, int, str]] = []
    for name, data in members(path, lambda name: _REVIEW.fullmatch(name) is not None, _REVIEW_LIMIT):
        match = _REVIEW.fullmatch(name)
        if match is None:  # never happens: members() yields only matching names
            continue
        with as_data_errors(path):
            found.append((match[1], int(match[2] == "pos"), int(match[3]), data.decode("utf-8")))
    found.sort(key=lambda row: row[:3])
    splits = {split: [row for row in found if row[0] == split] for split in ("train", "test")}
    if not all(splits.values()):
        raise DataError(f"{path} has no reviews under train/ and test/; a folder aclImdb with neg/ and pos/ is needed")
    texts = {split: [row[3] for row in rows] for split, rows in splits.items()}
    labels = {split: np.array([row[1] for row in rows], np.int64) for split, rows in splits.items()}
    return Reviews(texts["train"], labels["train"], texts["test"], labels["test"])


def compact_reviews(paths: tuple[Path, ...]) -> Reviews:
    """The parts are train negative, train positive, test negative, test positive."""
    with as_data_errors(paths[0]):
        lines = read_bounded(paths[0], _TEXT_LIMIT).decode("utf-8").split("\n")
    with as_data_errors(paths[1]):
        stars = np.load(io.BytesIO(read_bounded(paths[1], _STARS_LIMIT)), allow_pickle=False)
    if len(lines) % 4 or stars.shape != (len(lines),):
        raise DataError(
            f"{paths[0]} has {len(lines)} lines, ratings of shape {stars.shape}; four equal parts are needed"
        )
    quarter = len(lines) // 4
    y = np.repeat(np.array([0, 1, 0, 1], np.int64), quarter)
    if not np.array_equal(stars > 5, y.astype(bool)):
        raise DataError(f"{paths[1]} does not fit the order of the reviews in {paths[0].name}; get both again")
    half = 2 * quarter
    return Reviews(lines[:half], y[:half], lines[half:], y[half:])


def tokenise(text: str) -> list[str]:
    """Return lower-case words and numbers, also with an apostrophe (don't). Drops line-break tags and punctuation."""
    return _WORD.findall(_BREAK.sub(" ", text.lower()))


def build_vocabulary(documents: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Number the ``size - 2`` most frequent words from 2 on. Ties are in alphabetical order."""
    if size < 3:
        raise ConfigError("data.vocabulary", f"{size} is too small; allowed: 3 or more (padding, unknown, words)")
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(document)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return {word: i for i, word in enumerate(ranked, start=2)}


def encode(documents: Sequence[Sequence[str]], vocabulary: dict[str, int], length: int) -> Array:
    """Return int32 (N, length): the first ``length`` words, padded at the end. An empty text is one unknown word."""
    if length < 1:
        raise ConfigError("data.length", f"{length} is too short; allowed: 1 or more")
    ids = np.full((len(documents), length), PAD, np.int32)
    for row, document in zip(ids, documents, strict=True):
        known = [vocabulary.get(word, UNKNOWN) for word in document[:length]] or [UNKNOWN]
        row[: len(known)] = known
    return ids


def as_arrays(reviews: Reviews, options: ReadOptions) -> dict[str, Array]:
    """Turn both splits into token ids. The vocabulary comes from the training texts alone."""
    train, test = ([tokenise(text) for text in texts] for texts in (reviews.train, reviews.test))
    words = build_vocabulary(train, options.vocabulary)
    return {
        "x_train": encode(train, words, options.length),
        "y_train": reviews.y_train,
        "x_test": encode(test, words, options.length),
        "y_test": reviews.y_test,
    }
