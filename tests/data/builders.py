"""Tiny files in every official and compact format, made of random samples."""

import gzip
import io
import lzma
import os
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from freshet.data import load
from freshet.errors import DataError


def samples(count: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes, and labels in which every class occurs."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count, dtype=np.uint8) % classes


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_fashion(folder: Path, count: int = 20, zipped: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, prefix, seed in (("train", "train", 1), ("test", "t10k", 2)):
        x, y = samples(count, (28, 28), 10, seed)
        for name, array in ((f"{prefix}-images-idx3-ubyte", x), (f"{prefix}-labels-idx1-ubyte", y)):
            data = idx_bytes(array)
            (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = x[:, None], y
    return arrays


def tar_gz(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def unpacked(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return folder


def cifar_parts(classes: int, count: int = 100) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Batch name -> images (N, 3, 32, 32) and labels, named as in the official releases."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    return {name: samples(count, (3, 32, 32), classes, seed) for seed, name in enumerate(names)}


def cifar_binary(classes: int) -> dict[str, bytes]:
    folder = "cifar-10-batches-bin" if classes == 10 else "cifar-100-binary"
    files = {}
    for name, (x, y) in cifar_parts(classes).items():
        columns = [y[:, None]] if classes == 10 else [y[:, None] // 5, y[:, None]]
        files[f"{folder}/{name}.bin"] = np.concatenate([*columns, x.reshape(len(x), -1)], axis=1).tobytes()
    return files


def cifar_python(classes: int) -> dict[str, bytes]:
    folder = "cifar-10-batches-py" if classes == 10 else "cifar-100-python"
    key = b"labels" if classes == 10 else b"fine_labels"
    return {f"{folder}/{name}": python2_batch(x, y, key) for name, (x, y) in cifar_parts(classes).items()}


def python2_batch(x: np.ndarray, y: np.ndarray, key: bytes) -> bytes:
    """A CIFAR batch pickled byte for byte as Python 2 did for the official release (protocol 2)."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = x.tobytes()
    reconstruct = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85q\x04U\x01bq\x05\x87q\x06Rq\x07"
    )
    dtype = (
        b"cnumpy\ndtype\nq\x08U\x02u1q\x09K\x00K\x01\x87q\x0aRq\x0b"
        b"(K\x03U\x01|q\x0cNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x0db"
    )
    shape = b"M" + struct.pack("<H", len(x)) + b"M" + struct.pack("<H", 3072) + b"\x86q\x0e"
    array = reconstruct + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"q\x0ftq\x10b"
    labels = b"]q\x11(" + b"".join(b"K" + bytes([v]) for v in y) + b"e"
    entries = text(b"data") + array + text(key) + labels + text(b"batch_label") + text(b"batch 1 of 5")
    return b"\x80\x02}q\x01(" + entries + b"u."


def cifar_strips(folder: Path, classes: int) -> dict[str, np.ndarray]:
    """The compact form: six zips of lossless WebP strips."""
    result = []
    for i, name in enumerate([*(f"train_{k}" for k in range(1, 6)), "test"]):
        x, y = samples(100, (3, 32, 32), classes, seed=i)
        files = {"labels.npy": npy(y)}
        if classes == 100:
            files["coarse_labels.npy"] = npy(y // 5)
        for k in range(2):
            strip = x[50 * k : 50 * (k + 1)].transpose(0, 2, 3, 1).reshape(-1, 32, 3)
            files[f"strip_{k:02d}.webp"] = image_bytes(strip, "WEBP", lossless=True)
        zipped(folder / f"{name}.zip", files)
        result.append((x, y))
    return joined(result[:-1], result[-1])


def joined(train: list[tuple[np.ndarray, np.ndarray]], test: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        "x_train": np.concatenate([x for x, _ in train]),
        "y_train": np.concatenate([y for _, y in train]),
        "x_test": test[0],
        "y_test": test[1],
    }


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def image_bytes(array: np.ndarray, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


REVIEWS = {
    "train/neg": ["Bad, bad film.<br /><br />I don't like it", "a boring film"],
    "train/pos": ["A wonderful film!", "I like it; wonderful, wonderful"],
    "test/neg": ["bad zebra", "..."],
    "test/pos": ["wonderful", "I LIKE this film"],
}


def imdb_files() -> dict[str, bytes]:
    files = {"aclImdb/train/unsup/0_0.txt": b"unlabelled", "aclImdb/README": b"read me"}
    for part, texts in REVIEWS.items():
        for i, text in enumerate(texts):
            files[f"aclImdb/{part}/{i}_{9 if 'pos' in part else 2}.txt"] = text.encode()
    return files


def write_imdb_compact(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [text for part in REVIEWS.values() for text in part]
    (folder / "imdb_reviews.txt.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    np.save(folder / "ratings.npy", np.array([2, 2, 9, 9, 2, 2, 9, 9], np.uint8))


SPEAKERS = {"First Citizen": "Speak, speak! ", "ROMEO": "But soft; what light? ", "PAGE": "Ay. "}


def shakespeare_text(length: int = 2_100) -> str:
    """Speeches in turn: two speakers with ``length`` characters or more, one with little to say."""
    speeches = [f"{name}:\n{words * 10}" for _ in range(1 + length // 140) for name, words in SPEAKERS.items()]
    return "\n\n".join(speeches) + "\n"


def write_shakespeare(folder: Path, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = shakespeare_text().encode()
    (folder / ("tinyshakespeare.txt.xz" if packed else "input.txt")).write_bytes(
        lzma.compress(data) if packed else data
    )


def tiny_files() -> dict[str, bytes]:
    """Two classes, three training and two validation images each; one image is grey."""
    rng = np.random.default_rng(3)
    files = {"tiny-imagenet-200/words.txt": b"n00000001\tfirst, one\nn00000002\tsecond\nn00000009\tother\n"}
    rows = []
    for k, wnid in enumerate(("n00000002", "n00000001")):
        for i in range(3):
            shape = (64, 64) if i == 0 else (64, 64, 3)
            name = f"tiny-imagenet-200/train/{wnid}/images/{wnid}_{i}.JPEG"
            files[name] = image_bytes(rng.integers(0, 256, shape, dtype=np.uint8), "JPEG")
        for i in (2 * k, 2 * k + 1):
            data = image_bytes(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), "JPEG")
            files[f"tiny-imagenet-200/val/images/val_{i}.JPEG"] = data
            rows.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63")
    files["tiny-imagenet-200/val/val_annotations.txt"] = "\n".join(rows).encode()
    files["tiny-imagenet-200/test/images/test_0.JPEG"] = b"not read"
    return files


def write_tiny_compact(folder: Path) -> list[bytes]:
    """Compact npz files of 200 one-image classes; returns the training JPEGs."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(4)
    jpegs = []
    for part, count in (("train", 200), ("val", 200)):
        images = [rng.integers(0, 256, (64, 64) if i % 50 == 0 else (64, 64, 3), dtype=np.uint8) for i in range(count)]
        files = [image_bytes(image, "JPEG") for image in images]
        grey = np.array([image.ndim == 2 for image in images], np.uint8)
        heads = [_common_head([f for f, g in zip(files, grey, strict=True) if g == k]) for k in (0, 1)]
        bodies = [f[len(heads[g]) :] for f, g in zip(files, grey, strict=True)]
        np.savez(
            folder / f"{part}.npz",
            header_rgb=np.frombuffer(heads[0], np.uint8),
            header_gray=np.frombuffer(heads[1], np.uint8),
            is_gray=grey,
            payload=np.frombuffer(b"".join(bodies), np.uint8),
            offsets=np.cumsum([0, *map(len, bodies)]).astype(np.uint32),
            labels=np.arange(count, dtype=np.uint8),
            number=np.arange(count, dtype=np.uint16),
        )
        jpegs = jpegs or files
    lines = [f"{k}\tn{k:08d}\tname {k}, other" for k in range(200)]
    (folder / "classes.txt").write_text("\n".join(lines) + "\n")
    return jpegs


def _common_head(files: list[bytes]) -> bytes:
    head = files[0][:200]
    assert all(f.startswith(head) for f in files)
    return head


class RunsOnLoad:
    """Unpickling this creates a file."""

    def __init__(self, path: Path, function: Any = os.system) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, (f"touch {self.path}",)


def refusal(name: str, folder: Path) -> str:
    """Load a data set that must be refused and return the sentence."""
    with pytest.raises(DataError) as caught:
        load(name, folder, download=False, any_size=True)
    message = str(caught.value)
    assert "\n" not in message
    return message
