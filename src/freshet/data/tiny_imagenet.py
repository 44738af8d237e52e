"""Tiny-ImageNet-200 from the official zip or folder, or from compact npz files with the original JPEG bytes.

The official test images have no public labels. As usual in the literature, the validation images are the test set.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from freshet.data.archives import as_data_errors, members, read_bounded
from freshet.data.catalogue import ReadOptions
from freshet.data.dataset import Array
from freshet.errors import DataError
from freshet.files import open_regular

SIZE = 64
_TRAIN = re.compile(r"(?:.*/)?train/(n\d+)/(?:images/)?n\d+_(\d+)\.JPEG")
_VAL = re.compile(r"(?:.*/)?val/images/(val_(\d+)\.JPEG)")
_FILE_LIMIT = 1 << 24
_NPZ_LIMIT = 1 << 30  # bytes of one array; all 100,000 payloads would be 140 MB

_Row = tuple[str, int, bytes]  # class or file name, number, JPEG; decoded at the end into one array


def read_official(paths: tuple[Path, ...], _: ReadOptions) -> dict[str, Array]:
    """Read tiny-imagenet-200, zip or folder: train/<wnid>/images, val/images with val_annotations.txt, words.txt."""
    path = paths[0]
    texts: dict[str, str] = {}
    train: list[_Row] = []
    val: list[_Row] = []

    def wanted(name: str) -> bool:
        plain = name.endswith(("words.txt", "val_annotations.txt"))
        return plain or _TRAIN.fullmatch(name) is not None or _VAL.fullmatch(name) is not None

    for name, data in members(path, wanted, _FILE_LIMIT):
        if match := _TRAIN.fullmatch(name):
            train.append((match[1], int(match[2]), data))
        elif match := _VAL.fullmatch(name):
            val.append((match[1], int(match[2]), data))
        else:
            with as_data_errors(path):
                texts[name.rsplit("/", 1)[-1]] = data.decode("utf-8")
    answers = dict(line.split("\t")[:2] for line in texts.get("val_annotations.txt", "").splitlines() if "\t" in line)
    unlabelled = [name for name, _, _ in val if name not in answers]
    if not train or not val or unlabelled:
        lack = f"the label of {unlabelled[0]}" if unlabelled else "images under train/ or val/"
        raise DataError(f"{path} lacks {lack}; the official tiny-imagenet-200 is needed")
    return _assemble(path, train, [(answers[name], number, data) for name, number, data in val], texts)


def _assemble(path: Path, train: list[_Row], val: list[_Row], texts: dict[str, str]) -> dict[str, Array]:
    index = {wnid: i for i, wnid in enumerate(sorted({wnid for wnid, _, _ in train}))}
    if unknown := {wnid for wnid, _, _ in val} - set(index):
        raise DataError(f"{path}: validation images of class {min(unknown)}, which has no training images")
    words = dict(line.split("\t", 1) for line in texts.get("words.txt", "").splitlines() if "\t" in line)
    result = {"class_names": np.array([words.get(wnid, wnid) for wnid in index])}
    for part, rows in (("train", train), ("test", val)):
        rows.sort(key=lambda row: (index[row[0]], row[1]))
        files = ((f"{wnid} {part} image {number}", data) for wnid, number, data in rows)
        result[f"x_{part}"] = _decode_all(path, files, len(rows))
        result[f"y_{part}"] = np.array([index[wnid] for wnid, _, _ in rows], np.int64)
    return result


def read_compact(paths: tuple[Path, ...], _: ReadOptions) -> dict[str, Array]:
    """Read train.npz, val.npz and classes.txt: JPEGs as shared headers plus payloads, labels in sorted wnid order."""
    result: dict[str, Array] = {}
    for part, path in (("train", paths[0]), ("test", paths[1])):
        result[f"x_{part}"], result[f"y_{part}"] = read_npz(path)
    with as_data_errors(paths[2]):
        text = read_bounded(paths[2], _FILE_LIMIT).decode("utf-8")
        rows = [line.split("\t") for line in text.splitlines()]
        result["class_names"] = np.array([row[2] for row in rows])
    return result


def read_npz(path: Path) -> tuple[Array, Array]:
    with as_data_errors(path), open_regular(path, links=False) as file:
        with zipfile.ZipFile(file) as archive:
            if max((info.file_size for info in archive.infolist()), default=0) > _NPZ_LIMIT:
                raise DataError(f"{path} holds an array of more than {_NPZ_LIMIT:,} bytes; it is refused")
        file.seek(0)
        with np.load(file, allow_pickle=False) as content:
            heads = (content["header_rgb"].tobytes(), content["header_gray"].tobytes())
            payload, offsets = content["payload"].tobytes(), content["offsets"].astype(np.int64)
            gray, labels = content["is_gray"], content["labels"].astype(np.int64)
        whole = len(offsets) == len(labels) + 1 == len(gray) + 1 and len(labels) > 0
        if not whole or offsets[0] != 0 or offsets[-1] != len(payload) or (np.diff(offsets) <= 0).any():
            raise DataError(f"{path} has offsets that do not fit its payload or labels; get it again")
        files = (
            (f"image {i}", heads[int(gray[i] != 0)] + payload[offsets[i] : offsets[i + 1]]) for i in range(len(labels))
        )
        return _decode_all(path, files, len(labels)), labels


def _decode_all(path: Path, files: Iterable[tuple[str, bytes]], count: int) -> Array:
    images = np.empty((count, 3, SIZE, SIZE), np.uint8)
    for out, (name, data) in zip(images, files, strict=True):
        out[:] = decode(path, name, data)
    return images


def decode(path: Path, name: str, data: bytes) -> Array:
    """One JPEG as uint8 (3, 64, 64); grey images get three equal channels."""
    from PIL import Image

    with as_data_errors(path), Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        if image.size != (SIZE, SIZE):
            raise DataError(f"{path}: {name} is {image.width} x {image.height}; {SIZE} x {SIZE} is needed")
        return np.ascontiguousarray(np.asarray(image.convert("RGB")).transpose(2, 0, 1))
