"""Array files: compatible with safetensors, and checked when they are read."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from freshet.errors import RunError
from freshet.runs import checkpoint
from freshet.runs.checkpoint import contents, serialise, views


def written(path: Path, arrays: dict, notes: dict | None = None) -> Path:
    with path.open("wb") as file:
        file.writelines(serialise(arrays, notes))
    return path


def some() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    numbers = {f"n{kind}": rng.integers(0, 100, 7).astype(kind) for kind in ("u1", "i1", "u2", "i4", "i8", "u8", "f2")}
    return numbers | {
        "matrix": rng.normal(size=(3, 4)),
        "part": np.arange(20, dtype=np.float32)[::2],
        "flags": np.array([True, False]),
        "number": np.array(2.5),
        "nothing": np.zeros((0, 3), np.float32),
    }


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    back = load_file(written(tmp_path / "a", some(), {"who": "me"}))
    assert back.keys() == some().keys()
    assert all(np.array_equal(back[name], array) and back[name].dtype == array.dtype for name, array in some().items())


def test_arrays_survive_a_round_trip(tmp_path: Path) -> None:
    with written(tmp_path / "a", some(), {"who": "me"}).open("rb") as file:
        back, (_, notes) = views(file), contents(file)
    assert notes == {"who": "me"}
    assert list(back) == list(some())
    assert all(np.array_equal(back[name], array) and back[name].dtype == array.dtype for name, array in some().items())


@pytest.mark.parametrize(
    "arrays", [{"x": np.zeros(2, complex)}, {"x": np.zeros(2, ">f4")}, {"__metadata__": np.zeros(2)}]
)
def test_an_array_that_cannot_be_stored_is_named(arrays: dict) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        list(serialise(arrays))


def raw(header: object, data: bytes = bytes(8), size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HOSTILE = {
    "a header longer than the file": raw(entry(), size=2**63),
    "a header of a terabyte": raw(entry(), size=2**40),
    "no header": b"",
    "no object": raw([1, 2]),
    "no JSON": raw(b"{"),
    "nested without end": raw(b"[" * 100_000),
    "an array that is no object": raw({"a": 3}),
    "no type": raw({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "an unknown type": raw(entry(dtype="X")),
    "a type that is a list": raw(entry(dtype=[])),
    "a negative side": raw(entry(shape=(-1,))),
    "sides that are no integers": raw(entry(shape=(2.0,))),
    "a shape that does not fit": raw(entry(shape=(3,))),
    "one offset": raw(entry(offsets=(0,))),
    "offsets that are text": raw(entry(offsets=("0", "8"))),
    "a negative offset": raw(entry(offsets=(-8, 0))),
    "an end beyond the file": raw(entry(offsets=(8, 16))),
    "offsets in the wrong order": raw(entry(shape=(0,), offsets=(8, 0))),
    "notes that are no object": raw(entry() | {"__metadata__": 3}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_invalid_file_is_one_sentence(case: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[case])
    with path.open("rb") as file, pytest.raises(ValueError, match="the header of its arrays"):
        views(file)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_checkpoint_with_an_invalid_array_file_is_not_used(case: str, tmp_path: Path) -> None:
    for name in ("events", "metrics"):
        (tmp_path / f"{name}.jsonl").touch()
    folder = checkpoint.write(tmp_path, {"log": {"events": 0, "metrics": 0, "seq": 0}, "x": np.zeros(3)})
    (folder / "arrays.safetensors").write_bytes(HOSTILE[case])
    sums = {
        name: checkpoint._write(folder / name, iter([(folder / name).read_bytes()]))
        for name in ("state.json", "arrays.safetensors")
    }
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(RunError, match="the header of its arrays"):
        checkpoint.read(tmp_path)
