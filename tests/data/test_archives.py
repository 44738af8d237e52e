"""Damaged and hostile archives are refused with one sentence."""

import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from freshet.data.archives import members, read_bounded
from freshet.errors import DataError
from tests.data import builders as build

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil", "a/../../evil", "C:evil", "..\\evil"])
def test_paths_that_escape_are_refused(tmp_path: Path, name: str) -> None:
    files = {**build.cifar_binary(10), name: b"x"}
    build.tar_gz(tmp_path / "cifar-10-binary.tar.gz", files)
    assert "leads out of its folder" in build.refusal("cifar10", tmp_path)
    build.zipped(tmp_path / "tiny-imagenet-200.zip", {**build.tiny_files(), name: b"x"})
    assert "leads out of its folder" in build.refusal("tiny-imagenet", tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_special_files_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert "link or special file" in build.refusal("cifar10", tmp_path)


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        info = zipfile.ZipInfo("tiny-imagenet-200/words.txt")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    assert "link" in build.refusal("tiny-imagenet", tmp_path)


def test_decompression_bombs_are_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "train-images-idx3-ubyte.gz"
    bomb.write_bytes(gzip.compress(bytes(2_000_000)))
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        read_bounded(bomb, 1_000_000)
    xz = tmp_path / "reviews.xz"
    xz.write_bytes(lzma.compress(bytes(2_000_000)))
    with pytest.raises(DataError, match="more than"):
        read_bounded(xz, 1_000_000)
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big", bytes(2_000_000))
    with pytest.raises(DataError, match="at most 1,000 are allowed"):
        list(members(tmp_path / "b.zip", lambda _: True, 1000))
    build.tar_gz(tmp_path / "b.tar.gz", {"big": bytes(2_000_000)})
    with pytest.raises(DataError, match="at most 1,000 are allowed"):
        list(members(tmp_path / "b.tar.gz", lambda _: True, 1000))


def test_a_tar_that_declares_terabytes_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("unwanted")
    info.size = 1 << 42
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(info.tobuf()))
    assert "more than any known data set" in build.refusal("cifar10", tmp_path)


def truncate(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_truncated_files_of_every_format(tmp_path: Path, share: float) -> None:
    build.write_fashion(tmp_path / "fashion-mnist")
    truncate(tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz", share)
    build.refusal("fashion-mnist", tmp_path)
    for classes, release, files in ((10, "binary", build.cifar_binary(10)), (100, "python", build.cifar_python(100))):
        folder = tmp_path / release
        truncate(build.tar_gz(folder / f"cifar-{classes}-{release}.tar.gz", files), share)
        build.refusal(f"cifar{classes}", folder)
    build.cifar_strips(tmp_path / "cifar10", 10)
    truncate(tmp_path / "cifar10" / "train_2.zip", share)
    build.refusal("cifar10", tmp_path / "cifar10")
    truncate(build.zipped(tmp_path / "t" / "tiny-imagenet-200.zip", build.tiny_files()), share)
    build.refusal("tiny-imagenet", tmp_path / "t")
    build.write_imdb_compact(tmp_path / "imdb")
    truncate(tmp_path / "imdb" / "imdb_reviews.txt.xz", share)
    build.refusal("imdb", tmp_path)


def test_damaged_contents(tmp_path: Path) -> None:
    build.unpacked(tmp_path, build.cifar_binary(10))
    batch = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    good = batch.read_bytes()
    batch.write_bytes(good[:-1])
    assert "not a whole number of 3073-byte records" in build.refusal("cifar10", tmp_path)
    batch.write_bytes(b"\x63" + good[1:])
    assert "label 99 is out of range; allowed: 0 to 9" in build.refusal("cifar10", tmp_path)
    batch.unlink()
    assert "lacks data_batch_3.bin" in build.refusal("cifar10", tmp_path)
    build.write_fashion(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(build.idx_bytes(np.zeros((2, 2), np.uint8))))
    assert "not an IDX file" in build.refusal("fashion-mnist", tmp_path)
    huge = bytes([0, 0, 8, 3]) + b"\xff" * 12
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(huge))
    assert "declares" in build.refusal("fashion-mnist", tmp_path)


def test_object_arrays_in_compact_files_are_not_unpickled(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    evil = np.array([build.RunsOnLoad(trace)] * 8, dtype=object)
    build.write_imdb_compact(tmp_path / "imdb")
    np.save(tmp_path / "imdb" / "ratings.npy", evil, allow_pickle=True)
    build.refusal("imdb", tmp_path)
    build.cifar_strips(tmp_path / "cifar10", 10)
    buffer = io.BytesIO()
    np.save(buffer, evil, allow_pickle=True)
    build.zipped(tmp_path / "cifar10" / "train_1.zip", {"labels.npy": buffer.getvalue()})
    build.refusal("cifar10", tmp_path)
    build.write_tiny_compact(tmp_path / "tiny_imagenet")
    with np.load(tmp_path / "tiny_imagenet" / "val.npz") as content:
        arrays = dict(content)
    np.savez(tmp_path / "tiny_imagenet" / "val.npz", **{**arrays, "labels": evil})
    build.refusal("tiny-imagenet", tmp_path)
    assert not trace.exists()


def test_compact_tiny_imagenet_with_wrong_offsets(tmp_path: Path) -> None:
    build.write_tiny_compact(tmp_path / "tiny_imagenet")
    path = tmp_path / "tiny_imagenet" / "train.npz"
    with np.load(path) as content:
        arrays = dict(content)
    np.savez(path, **{**arrays, "offsets": arrays["offsets"][::-1]})
    assert "offsets" in build.refusal("tiny-imagenet", tmp_path)
    np.savez(path, **{k: v for k, v in arrays.items() if k != "payload"})
    assert "train.npz is damaged" in build.refusal("tiny-imagenet", tmp_path)
