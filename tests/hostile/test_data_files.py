"""Data from strangers: small files cannot hang, crash or fill the machine, and only regular files are read."""

import gzip
import io
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.data import archives, imdb, tiny_imagenet
from freshet.data.archives import members, read_bounded
from freshet.data.catalogue import ReadOptions
from freshet.data.cifar import read_python
from freshet.data.plain_pickle import MAX_DEPTH, load_plain
from freshet.errors import DataError


def doubled(times: int) -> bytes:
    """A tuple of two of the tuple before, so many times: 2 ** times leaves in a few bytes."""
    return b"\x80\x02K\x01" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(times))


#: Each took for ever, or took the interpreter down, when the reader hashed, compared or printed what it had built.
BOMBS = {
    "a key of 2 ** 60 leaves": b"\x80\x02}" + doubled(60)[2:] + b"K\x01s.",
    "a key of 100,000 levels": b"\x80\x02}K\x01" + b"\x85" * 100_000 + b"K\x01s.",
    "a value of 2 ** 60 leaves": b"\x80\x02}K\x01" + doubled(60)[2:] + b"s.",
    "a value of 100,000 levels": b"\x80\x02}K\x01K\x01" + b"\x85" * 100_000 + b"s.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a dict in itself": b"\x80\x02}q\x00K\x01h\x00s.",
    "a type with 2 ** 60 leaves": b"\x80\x02cnumpy\ndtype\n" + doubled(60)[2:] + b"\x85R.",
    "a module with 2 ** 60 leaves": b"\x80\x02" + doubled(60)[2:] + b"\x8c\x01x\x93.",
    "an encoding with 2 ** 60 leaves": b"\x80\x02c_codecs\nencode\n\x8c\x01x" + doubled(60)[2:] + b"\x86R.",
    "four million lists": b"\x80\x02(" + b"]" * 4_000_000 + b"t.",
    "a name of a megabyte": b"cos\n" + b"x" * 1_000_000 + b"\n.",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.timeout(300)
def test_a_pickle_bomb_is_refused_at_once_with_a_short_sentence(bomb: str) -> None:
    begun = time.process_time()
    with pytest.raises(DataError) as caught:
        load_plain(BOMBS[bomb])
    assert time.process_time() - begun < 10
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("bomb", ["four million lists", "a value of 2 ** 60 leaves"])
def test_a_pickle_bomb_takes_little_memory(bomb: str, tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(BOMBS[bomb])
    program = (
        "import resource, sys; from pathlib import Path; from freshet.data.plain_pickle import load_plain\n"
        "content = Path(sys.argv[1]).read_bytes()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: load_plain(content)\nexcept ValueError: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "bomb"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * (1 if sys.platform == "darwin" else 1024) < 256 * 2**20


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=20,
)


@given(plain, st.integers(3, 5))
def test_plain_data_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    try:
        assert load_plain(content) == value
    except DataError as error:
        assert f"more than {MAX_DEPTH} deep" in str(error)


@given(st.binary(max_size=200))
@settings(deadline=20_000)
def test_any_bytes_are_plain_data_or_one_sentence(content: bytes) -> None:
    try:
        load_plain(b"\x80\x02" + content)
    except DataError as error:
        assert len(str(error)) < 300 and "\n" not in str(error).strip()


# ---- folders and archives


def batch(labels: list[int]) -> bytes:
    return pickle.dumps({"data": np.zeros((len(labels), 3072), np.uint8), "labels": labels}, 2)


@pytest.mark.parametrize("label", [10**30, 10, -1])
def test_a_label_out_of_range_is_one_sentence(tmp_path: Path, label: int) -> None:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(batch([0, label]))
    with pytest.raises(DataError, match="no list of 2 labels from 0 to 9"):
        read_python((tmp_path,), ReadOptions(10))


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "link to a device"])
@pytest.mark.timeout(300)
def test_only_regular_files_of_a_folder_are_read(tmp_path: Path, kind: str) -> None:
    folder, name = tmp_path / "data", tmp_path / "data" / "train.bin"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "device":
        try:
            os.mknod(name, 0o20666, Path("/dev/zero").stat().st_rdev)
        except PermissionError:
            pytest.skip("only the administrator may make devices")
    else:
        name.symlink_to(tmp_path / "secret" if kind == "link" else "/dev/zero")
    with pytest.raises(DataError, match=r"cannot be read \((it is a link|it is not a regular file|Permission)"):
        list(members(folder, lambda name: True))
    with pytest.raises(DataError, match=r"cannot be read \((it is a link|it is not a regular file|Permission)"):
        read_bounded(name, 1000)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["set.zip", "set.tar.gz"])
def test_an_archive_that_is_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="not a regular file"):
        list(members(tmp_path / name, lambda name: True))


def test_an_archive_that_unpacks_to_many_times_its_size_is_refused_unread(tmp_path: Path) -> None:
    content, zeros = io.BytesIO(), bytes(archives.MAX_MEMBER_BYTES // 4)
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.bin", zeros)
        archive.writestr("b.bin", zeros)
    (tmp_path / "bomb.zip").write_bytes(content.getvalue())
    read: list[str] = []
    with pytest.raises(DataError, match="more than 20 times as much; it is refused"):
        read += [name for name, _ in members(tmp_path / "bomb.zip", lambda name: True)]
    assert read == []


def header(name: str, kind: bytes, size: int, **more: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for key, value in more.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse(entries: int) -> bytes:
    """A member whose map of holes (GNU's format 1.0, in its data) has so many entries of two bytes."""
    records = [b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.name=x", b"GNU.sparse.realsize=1"]
    pax = b"".join(b"%d %s\n" % (len(record) + 4, record) for record in records).ljust(512, b"\0")
    size = sum(len(record) + 4 for record in records)
    listed = (b"%d\n" % entries) + b"0\n" * 2 * entries
    whole = listed.ljust(-(-len(listed) // 512) * 512, b"\0")
    return header("x", tarfile.XHDTYPE, size) + pax + header("x", tarfile.REGTYPE, len(whole)) + whole


LONG, END = 1 << 26, bytes(1024)
#: What ``tarfile`` reads whole, or keeps, before it tells anybody of a member.
TARS = {
    "a long name": lambda: header("L", tarfile.GNUTYPE_LONGNAME, LONG) + bytes(LONG) + header("x", b"0", 0) + END,
    "a long link": lambda: header("K", tarfile.GNUTYPE_LONGLINK, LONG) + bytes(LONG) + header("x", b"0", 0) + END,
    "attributes": lambda: header("x", tarfile.XHDTYPE, LONG) + bytes(LONG) + header("x", b"0", 0) + END,
    "attributes of all": lambda: header("g", tarfile.XGLTYPE, LONG) + bytes(LONG) + header("x", b"0", 0) + END,
    "a map of holes": lambda: sparse(1 << 19) + END,
    "many long names": lambda: (
        (header("L", tarfile.GNUTYPE_LONGNAME, 1 << 15) + b"x" * (1 << 15) + header("x", b"0", 0)) * 1000 + END
    ),
}


@pytest.mark.parametrize("bomb", TARS)
@pytest.mark.timeout(300)
def test_the_headers_of_a_tar_take_little_memory(bomb: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(TARS[bomb](), 1))
    found = ""
    tracemalloc.start()
    try:
        for _ in members(tmp_path / "bomb.tar.gz", lambda name: True):
            continue
    except DataError as error:
        found = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20
    if bomb != "many long names":  # each of which is allowed
        assert found.endswith("longer than any data set needs; the archive is refused")


@pytest.mark.parametrize("packed", ["", "gz", "bz2", "xz"])
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_ordinary_tars_with_long_names_are_read(tmp_path: Path, packed: str, form: int) -> None:
    names = ["set/" + "n" * 90, "set/" + 20 * "long/" + "n" * 20, "set/plain"]
    with tarfile.open(tmp_path / "set.tar", f"w:{packed}", format=form, pax_headers={"comment": "x" * 1000}) as archive:  # type: ignore[call-overload]
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 100_000 * number
            archive.addfile(info, io.BytesIO(bytes([number]) * info.size))
    found = list(members(tmp_path / "set.tar", lambda name: "plain" in name or "long" in name))
    assert found == [(names[1], b"\1" * 100_000), (names[2], b"\2" * 200_000)]


@pytest.mark.timeout(60)
def test_a_member_of_negative_size_is_refused(tmp_path: Path) -> None:
    """With which ``tarfile`` goes back and reads the same members again and again."""
    before = header("a", b"0", 0) + header("b", b"0", 0)
    (tmp_path / "bomb.tar").write_bytes(before + header("x", b"0", -1024) + END)
    with pytest.raises(DataError, match="'x', a link or special file"):
        list(members(tmp_path / "bomb.tar", lambda name: False))


def compact(folder: Path, odd: str, kind: str) -> tuple[Path, ...]:
    """The files of a compact format, of which one is a pipe or leads to a device that never ends."""
    names = ("train.npz", "val.npz", "classes.txt") if odd in ("train.npz", "classes.txt") else ("x.txt.xz", "y.npy")
    for name in names:
        (folder / name).write_bytes(lzma.compress(b"a\nb\nc\nd"))
    (folder / odd).unlink()
    if kind == "pipe":
        os.mkfifo(folder / odd)
    else:
        (folder / odd).symlink_to("/dev/zero")
    return tuple(folder / name for name in names)


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
@pytest.mark.parametrize("odd", ["y.npy", "train.npz", "classes.txt"])
@pytest.mark.timeout(60)
def test_compact_formats_read_regular_files_only(
    tmp_path: Path, odd: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = compact(tmp_path, odd, kind)
    if odd == "classes.txt":
        monkeypatch.setattr(tiny_imagenet, "read_npz", lambda path: (np.zeros(1), np.zeros(1)))
    read = imdb.read_compact if odd == "y.npy" else tiny_imagenet.read_compact
    with pytest.raises(DataError, match=rf"{odd} cannot be read \((it is a link|it is not a regular file)"):
        read(paths, ReadOptions(2, vocabulary=10, length=4))


def test_a_list_of_classes_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_imagenet, "read_npz", lambda path: (np.zeros(1), np.zeros(1)))
    with (tmp_path / "classes.txt").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(DataError, match="too large for this format; it is refused"):
        tiny_imagenet.read_compact((tmp_path / "a", tmp_path / "b", tmp_path / "classes.txt"), ReadOptions(200))
