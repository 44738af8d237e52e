"""Text with TextCNN: words become token ids, and short texts are padded. The rest is as with images.

python examples/text.py          (FRESHET_SHORT=1 for a few seconds)

`freshet run --cell textcnn-imdb -m fedasmu` (see `freshet cells`) uses the real IMDb reviews.
"""

import os

import numpy as np

import freshet
from freshet.data import from_arrays

SHORT = bool(os.environ.get("FRESHET_SHORT"))
GOOD = ["lovely", "superb", "funny", "warm", "clever", "brilliant"]
BAD = ["dull", "awful", "slow", "boring", "clumsy", "empty"]
FILLER = [
    "the",
    "a",
    "film",
    "plot",
    "scene",
    "was",
    "with",
    "and",
    "of",
    "in",
    "its",
    "actor",
    "music",
    "story",
    "end",
]
LENGTH = 12


def reviews(count: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Invent reviews: mostly filler, with two words of opinion."""
    rng = np.random.default_rng(seed)
    texts, labels = [], rng.integers(0, 2, count)
    for label in labels:
        opinion = rng.choice(GOOD if label else BAD, 2)
        words = [*rng.choice(FILLER, rng.integers(4, LENGTH - 2)), *opinion]
        rng.shuffle(words)
        texts.append(" ".join(words))
    return texts, labels


def encode(texts: list[str], vocabulary: dict[str, int]) -> np.ndarray:
    """Return token ids of one length. 0 is padding, 1 an unknown word."""
    out = np.zeros((len(texts), LENGTH), np.int32)
    for row, text in enumerate(texts):
        ids = [vocabulary.get(word, 1) for word in text.split()][:LENGTH]
        out[row, : len(ids)] = ids
    return out


train_texts, train_labels = reviews(900, seed=0)
test_texts, test_labels = reviews(300, seed=1)
words = sorted({word for text in train_texts for word in text.split()})
vocabulary = {word: number for number, word in enumerate(words, 2)}

data = from_arrays(
    "reviews",
    (encode(train_texts, vocabulary), train_labels),
    (encode(test_texts, vocabulary), test_labels),
    vocabulary=len(words) + 2,
    pad_id=0,
    class_names=("bad", "good"),
)
federation = freshet.Federation(
    model={"name": "textcnn", "embedding_dim": 16, "filters": 16, "widths": [2, 3]},
    train=data,
    devices=20,
    method="fedasmu",
    training={"lr": 0.1, "epochs": 3},
    run={"eval_every": 20},
)
result = federation.run(until="1m" if SHORT else "10m")
print(f"{federation.assembly.layout.size:,} parameters are sent")
print(f"accuracy {result.accuracy[0]:.2f} -> {result.accuracy[-1]:.2f}")
