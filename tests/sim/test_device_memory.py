"""Device memories: bounded in main memory, and the same bits after a detour through a file."""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.compute.executor import LazyFuture
from freshet.core.method import Memory
from freshet.runs.checkpoint import LazyArray, copy_arrays
from freshet.sim.device_memory import MAX_PENDING, DeviceStore, array_bytes
from freshet.training.trip import TripOutcome


def memory(seed: int, size: int = 100) -> Memory:
    """All kinds of values that rules keep: arrays of several types, numbers, text, and unusual floats."""
    rng = np.random.default_rng(seed)
    out: Memory = {"slot": seed, "gamma": float(rng.normal()) / 3.0, "who": "q"}
    out["V"] = rng.standard_normal(size).astype(np.float32)
    out["V"][:2] = np.nan, np.inf
    return out | {"table": rng.standard_normal((3, 5)), "first": bool(seed % 2), "counts": np.arange(3), "tiny": 5e-324}


def equal(a: Memory, b: Memory) -> bool:
    """The same names in the same order, the same types, the same bits."""
    return list(a) == list(b) and all(_bits(a[name]) == _bits(b[name]) for name in a)


def _bits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes())
    return (type(value), value)


def test_a_memory_comes_back_from_disk_bit_for_bit(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "spilled", limit_bytes=3 * array_bytes(memory(0)))
    for device in range(10):
        store.put(device, memory(device))
    assert store.spilled_count == 7
    assert sorted(path.suffix for path in (tmp_path / "spilled").iterdir()) == [".safetensors"] * 7
    for device in range(10):
        assert equal(store.get(device), memory(device))
        assert store.bytes_in_memory <= store.limit_bytes
    assert store.get(99) == {}


def test_the_least_recently_used_is_spilled_first(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "spilled", limit_bytes=2 * array_bytes(memory(0)))
    for device in (0, 1):
        store.put(device, memory(device))
    store.get(0)
    store.put(2, memory(2))
    assert [path.name for path in (tmp_path / "spilled").iterdir()] == ["device-1.safetensors"]
    store.put(1, memory(7))  # the file is out of date
    assert equal(store.get(1), memory(7))
    assert [path.name for path in (tmp_path / "spilled").iterdir()] == ["device-0.safetensors"]


def test_a_memory_larger_than_the_limit_stays_on_disk(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "spilled", limit_bytes=10)
    store.put(3, memory(3))
    assert (store.spilled_count, store.bytes_in_memory) == (1, 0)
    assert equal(store.get(3), memory(3))


def test_memories_without_arrays_are_never_spilled(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "spilled", limit_bytes=0)
    for device in range(50):
        store.put(device, {"gamma": 0.1 * device})
    assert (store.spilled_count, (tmp_path / "spilled").exists()) == (0, False)


def test_values_beside_the_arrays_come_back_unchanged(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "spilled", limit_bytes=0)
    kept: Memory = {"count": {1: 2, (3, "a"): 4.5}, "w": np.arange(3.0), "pair": (1, None), "deep": [np.arange(2)]}
    store.put(0, kept)
    found = store.get(0)
    assert store.spilled_count == 1 and list(found) == list(kept)
    assert (found["count"], found["pair"]) == (kept["count"], kept["pair"])
    assert np.array_equal(found["w"], kept["w"]) and np.array_equal(found["deep"][0], kept["deep"][0])


def test_arrays_of_any_shape_and_order(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "spilled", limit_bytes=0)
    kept: Memory = {"scalar": np.array(2.5), "empty": np.zeros((0, 3)), "turned": np.arange(6.0).reshape(2, 3).T}
    store.put(0, kept)
    found = store.get(0)
    assert all(found[name].shape == kept[name].shape for name in kept)
    assert all(np.array_equal(found[name], kept[name]) for name in kept)


def test_the_folder_is_made_when_needed_without_old_files_and_removed_with_the_store(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "spilled"
    folder.mkdir()
    (folder / "device-7.safetensors").write_bytes(b"left by a run that was killed")
    store = DeviceStore(folder, limit_bytes=0)
    store.put(0, memory(0))
    assert [path.name for path in folder.iterdir()] == ["device-0.safetensors"]
    assert equal(store.get(0), memory(0))
    del store
    gc.collect()
    assert not folder.exists()


def test_pending_outcomes_are_awaited(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "spilled", limit_bytes=0)
    store.put(0, memory(0))
    store.defer(0, LazyFuture(lambda: outcome_of(5)))
    assert equal(store.get(0), memory(5))
    store.defer(0, LazyFuture(lambda: outcome_of(6)))
    assert equal(copy_arrays(store.state()["memory"]["0"]), memory(6))


def outcome_of(seed: int) -> TripOutcome:
    return TripOutcome(np.zeros(1, np.float32), 1, {}, {}, {}, memory(seed))


def test_finished_outcomes_are_stored_at_once(tmp_path: Path) -> None:
    store, outcome = DeviceStore(tmp_path), LazyFuture(lambda: outcome_of(3))
    outcome.result()
    store.defer(3, outcome)
    assert store.bytes_in_memory == array_bytes(memory(3))
    assert equal(store.get(3), memory(3))


def test_only_a_few_outcomes_stay_pending(tmp_path: Path) -> None:
    store, computed = DeviceStore(tmp_path), []

    def outcome(device: int) -> LazyFuture[TripOutcome]:
        return LazyFuture(lambda: computed.append(device) or outcome_of(device))

    for device in range(MAX_PENDING + 5):
        store.defer(device, outcome(device))
    assert computed == [0, 1, 2, 3, 4], "the oldest are awaited first"
    assert all(equal(store.get(device), memory(device)) for device in range(MAX_PENDING + 5))


def test_a_state_leaves_spilled_arrays_on_disk(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "a", limit_bytes=0)
    store.put(1, memory(1))
    kept = store.state()["memory"]["1"]
    arrays = {name: value for name, value in kept.items() if isinstance(value, LazyArray)}
    assert arrays.keys() == {name for name, value in memory(1).items() if isinstance(value, np.ndarray)}
    assert all(a.shape == memory(1)[name].shape and a.dtype == memory(1)[name].dtype for name, a in arrays.items())
    assert equal(copy_arrays(kept), memory(1))


def test_the_state_holds_everything_and_restores_it(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path / "a", limit_bytes=2 * array_bytes(memory(0)))
    for device in (4, 2, 9, 0):
        store.put(device, memory(device))
        store.record_trip(device, 1.5 * device)
    store.record_trip(9, 0.5)
    state = store.state()
    assert store.bytes_in_memory <= store.limit_bytes
    again = DeviceStore(tmp_path / "b", limit_bytes=array_bytes(memory(0)))
    again.restore(state)
    for device in (0, 2, 4, 9):
        assert equal(again.get(device), memory(device))
    assert again.mean_seconds(9) == 7.0
    assert again.mean_seconds(5) is None
    assert list(again.state()["memory"]) == ["0", "2", "4", "9"]


def test_mean_seconds_of_completed_trips(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path)
    assert store.mean_seconds(0) is None
    for seconds in (2.0, 3.0, 7.0):
        store.record_trip(0, seconds)
    assert store.mean_seconds(0) == pytest.approx(4.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 99)), max_size=25), st.integers(0, 2000))
def test_any_sequence_gives_the_same_as_an_unbounded_store(steps: list[tuple[bool, int, int]], limit: int) -> None:
    with TemporaryDirectory() as folder:
        bounded, free = DeviceStore(Path(folder) / "a", limit_bytes=limit), DeviceStore(Path(folder) / "b")
        for is_put, device, seed in steps:
            if is_put:
                for store in (bounded, free):
                    store.put(device, memory(seed, size=20 + 50 * (seed % 3)))
            else:
                assert equal(bounded.get(device), free.get(device))
            assert bounded.bytes_in_memory <= limit
        assert list(bounded.state()["memory"]) == list(free.state()["memory"])
