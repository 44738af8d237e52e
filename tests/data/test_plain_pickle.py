"""Pickles are read as plain data and never run."""

import contextlib
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.data.plain_pickle import load_plain
from freshet.errors import DataError
from tests.data import builders as build

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_pickles_of_every_protocol(protocol: int) -> None:
    value = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2], "t": (1, None, True, 2.5, "x")}
    result = load_plain(pickle.dumps(value, protocol))
    assert np.array_equal(result[b"data"], value[b"data"])
    assert result["labels"] == [1, 2]
    assert result["t"] == value["t"]
    fortran = pickle.dumps({"d": np.asfortranarray(np.arange(6.0).reshape(2, 3))}, protocol)
    assert np.array_equal(load_plain(fortran)["d"], np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", [os.system, eval, exec])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path, protocol: int, function: Any) -> None:
    trace = tmp_path / "trace"
    batch = pickle.dumps({"data": build.RunsOnLoad(trace, function), "labels": [0]}, protocol)
    files = dict.fromkeys(build.cifar_python(10), batch)
    build.tar_gz(tmp_path / "cifar-10-python.tar.gz", files)
    assert "refused" in build.refusal("cifar10", tmp_path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(build.RunsOnLoad(trace)))  # the trap itself works
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


@pytest.mark.parametrize("opcode", [b"(", b"N", b"\x88", b"K\x01"], ids=["mark", "none", "true", "integer"])
def test_a_pickle_of_many_instructions_is_refused_early(opcode: bytes) -> None:
    """20 million marks (20 MB) took 13 s."""
    begin = time.process_time()
    with pytest.raises(DataError, match="more than 1,000,000 instructions"):
        load_plain(b"\x80\x02" + opcode * 20_000_000 + b".")
    assert time.process_time() - begin < 6.0
