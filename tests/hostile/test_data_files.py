"""Data from anybody: small files cannot hang, crash or fill this machine, and nothing but regular files is read."""

import io
import os
import pickle
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.data import archives
from freshet.data.archives import members, read_bounded
from freshet.data.cifar import read_python
from freshet.data.plain_pickle import DEEPEST, load_plain
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
def test_honest_plain_data_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    try:
        assert load_plain(content) == value
    except DataError as error:
        assert f"more than {DEEPEST} deep" in str(error)


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
        read_python(tmp_path, 10)


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "link to a device"])
@pytest.mark.timeout(300)
def test_nothing_but_regular_files_is_read_from_a_folder(tmp_path: Path, kind: str) -> None:
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
    content, zeros = io.BytesIO(), bytes(archives.MEMBER_LIMIT // 4)
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.bin", zeros)
        archive.writestr("b.bin", zeros)
    (tmp_path / "bomb.zip").write_bytes(content.getvalue())
    read: list[str] = []
    with pytest.raises(DataError, match="more than 20 times as much; it is refused"):
        read += [name for name, _ in members(tmp_path / "bomb.zip", lambda name: True)]
    assert read == []
