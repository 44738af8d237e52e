"""Damaged and hostile files: each is refused with one sentence, and nothing that they ask for is done."""

import contextlib
import gzip
import io
import lzma
import os
import pickle
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import data_builders as build
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.data import load
from freshet.data.archives import members, read_bounded
from freshet.data.plain_pickle import load_plain
from freshet.errors import DataError

pytestmark = pytest.mark.usefixtures("nowhere")


def refused(name: str, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        load(name, folder, download=False, any_size=True)
    message = str(caught.value)
    assert "\n" not in message
    return message


class Runs:
    """Unpickling this would create a file."""

    def __init__(self, path: Path, function: Any = os.system) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", [os.system, eval, exec])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path, protocol: int, function: Any) -> None:
    trace = tmp_path / "trace"
    batch = pickle.dumps({"data": Runs(trace, function), "labels": [0]}, protocol)
    files = dict.fromkeys(build.cifar_python(10), batch)
    build.tar_gz(tmp_path / "cifar-10-python.tar.gz", files)
    assert "refused" in refused("cifar10", tmp_path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Runs(trace)))  # the trap itself works
    assert trace.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cnumpy\nload\n.",
        b"cnumpy.core.multiarray\n_reconstruct\n.",
        b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
        b"\x80\x02cbuiltins\ngetattr\ncnumpy\nndarray\nU\x04dump\x86R.",
        b"(i__main__\nX\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02]K\x01\x93.",
        b"\x80\x02}K\x01a.",
        b"\x80\x02(t",
        b"\x80\x02u.",
        b"\x80\x02h\x07.",
        b"Pabc\n.",
        b"\x82\x01.",
        b"",
        b".",
        b"\x80\x02NN.",
    ],
)
def test_odd_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        load_plain(data)


def test_a_small_pickle_cannot_fill_the_memory() -> None:
    text = b"X" + (1000).to_bytes(4, "little") + b"a" * 1000
    encode = b"c_codecs\nencode\nq\x00" + text + b"q\x01X\x06\x00\x00\x00latin1q\x02"
    again = b"h\x00h\x01h\x02\x86R"
    with pytest.raises(DataError, match="repeats data"):
        load_plain(b"\x80\x02(" + encode + again * 20_000 + b"t.")
    shape = b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"
    honest = build.python2_batch(*build.samples(2, (3, 32, 32), 10), b"labels")
    at = honest.index(b"M\x02\x00M")
    with pytest.raises(DataError):
        load_plain(honest[:at] + shape + honest[at + 7 :])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32))
def test_a_damaged_pickle_is_read_or_refused_but_never_runs(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(build.python2_batch(*build.samples(2, (3, 32, 32), 10), b"labels"))
    header = len(data) - 2 * 3072
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(min(header, 250))] = rng.randrange(256)
    with contextlib.suppress(DataError):
        load_plain(bytes(data))


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil", "a/../../evil", "C:evil", "..\\evil"])
def test_paths_that_escape_are_refused(tmp_path: Path, name: str) -> None:
    files = {**build.cifar_binary(10), name: b"x"}
    build.tar_gz(tmp_path / "cifar-10-binary.tar.gz", files)
    assert "leads out of its folder" in refused("cifar10", tmp_path)
    build.zipped(tmp_path / "tiny-imagenet-200.zip", {**build.tiny_files(), name: b"x"})
    assert "leads out of its folder" in refused("tiny-imagenet", tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_special_files_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert "link or special file" in refused("cifar10", tmp_path)


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        info = zipfile.ZipInfo("tiny-imagenet-200/words.txt")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    assert "link" in refused("tiny-imagenet", tmp_path)


def test_bombs_are_refused_before_they_burst(tmp_path: Path) -> None:
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


def test_a_tar_that_promises_terabytes_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("unwanted")
    info.size = 1 << 42
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(info.tobuf()))
    assert "beyond any known set" in refused("cifar10", tmp_path)


def truncate(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_truncated_files_of_every_format(tmp_path: Path, share: float) -> None:
    build.write_fashion(tmp_path / "fashion-mnist")
    truncate(tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz", share)
    refused("fashion-mnist", tmp_path)
    for classes, release, files in ((10, "binary", build.cifar_binary(10)), (100, "python", build.cifar_python(100))):
        folder = tmp_path / release
        truncate(build.tar_gz(folder / f"cifar-{classes}-{release}.tar.gz", files), share)
        refused(f"cifar{classes}", folder)
    build.cifar_strips(tmp_path / "cifar10", 10)
    truncate(tmp_path / "cifar10" / "train_2.zip", share)
    refused("cifar10", tmp_path / "cifar10")
    truncate(build.zipped(tmp_path / "t" / "tiny-imagenet-200.zip", build.tiny_files()), share)
    refused("tiny-imagenet", tmp_path / "t")
    build.write_imdb_compact(tmp_path / "imdb")
    truncate(tmp_path / "imdb" / "imdb_reviews.txt.xz", share)
    refused("imdb", tmp_path)


def test_damaged_contents(tmp_path: Path) -> None:
    build.unpacked(tmp_path, build.cifar_binary(10))
    batch = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    good = batch.read_bytes()
    batch.write_bytes(good[:-1])
    assert "not a whole number of 3073-byte records" in refused("cifar10", tmp_path)
    batch.write_bytes(b"\x63" + good[1:])
    assert "label 99 is out of range; allowed: 0 to 9" in refused("cifar10", tmp_path)
    batch.unlink()
    assert "lacks data_batch_3.bin" in refused("cifar10", tmp_path)
    build.write_fashion(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(build.idx_bytes(np.zeros((2, 2), np.uint8))))
    assert "not an IDX file" in refused("fashion-mnist", tmp_path)
    huge = bytes([0, 0, 8, 3]) + b"\xff" * 12
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(huge))
    assert "promises" in refused("fashion-mnist", tmp_path)


def test_object_arrays_in_compact_files_are_not_unpickled(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    evil = np.array([Runs(trace)] * 8, dtype=object)
    build.write_imdb_compact(tmp_path / "imdb")
    np.save(tmp_path / "imdb" / "ratings.npy", evil, allow_pickle=True)
    refused("imdb", tmp_path)
    build.cifar_strips(tmp_path / "cifar10", 10)
    buffer = io.BytesIO()
    np.save(buffer, evil, allow_pickle=True)
    build.zipped(tmp_path / "cifar10" / "train_1.zip", {"labels.npy": buffer.getvalue()})
    refused("cifar10", tmp_path)
    build.write_tiny_compact(tmp_path / "tiny_imagenet")
    with np.load(tmp_path / "tiny_imagenet" / "val.npz") as content:
        arrays = dict(content)
    np.savez(tmp_path / "tiny_imagenet" / "val.npz", **{**arrays, "labels": evil})
    refused("tiny-imagenet", tmp_path)
    assert not trace.exists()


def test_compact_tiny_imagenet_with_wrong_offsets(tmp_path: Path) -> None:
    build.write_tiny_compact(tmp_path / "tiny_imagenet")
    path = tmp_path / "tiny_imagenet" / "train.npz"
    with np.load(path) as content:
        arrays = dict(content)
    np.savez(path, **{**arrays, "offsets": arrays["offsets"][::-1]})
    assert "offsets" in refused("tiny-imagenet", tmp_path)
    np.savez(path, **{k: v for k, v in arrays.items() if k != "payload"})
    assert "train.npz is damaged" in refused("tiny-imagenet", tmp_path)
