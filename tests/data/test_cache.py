"""The cache of decoded arrays."""

from pathlib import Path

import numpy as np
import pytest

from freshet.data import cache

ARRAYS = {"x": np.arange(6, dtype=np.uint8).reshape(2, 3), "names": np.array(["a", "bc"])}


def test_cache_round_trip_and_damage(tmp_path: Path) -> None:
    assert cache.fetch("toy", "k" * 32) is None
    cache.store("toy", "k" * 32, ARRAYS)
    found = cache.fetch("toy", "k" * 32)
    assert found is not None and all(np.array_equal(found[k], v) for k, v in ARRAYS.items())
    file = tmp_path / "cache" / "decoded" / ("toy-" + "k" * 32) / "x.npy"
    good = file.read_bytes()
    for bad in (good[:-1] + b"\xff", good[:20], b""):
        file.write_bytes(bad)
        assert cache.fetch("toy", "k" * 32) is None
    cache.store("toy", "k" * 32, ARRAYS)  # a damaged entry is replaced
    assert cache.fetch("toy", "k" * 32) is not None
    (file.parent / "index.json").write_text("[]")
    assert cache.fetch("toy", "k" * 32) is None


def test_cache_keeps_few_entries_and_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8):
        cache.store("toy", f"{i:032d}", ARRAYS)
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 4
    assert cache.fetch("toy", f"{7:032d}") is not None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FRESHET_CACHE", str(tmp_path / "file" / "below"))
    cache.store("toy", "0" * 32, ARRAYS)
    assert cache.fetch("toy", "0" * 32) is None


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    first = cache.fingerprint((file,), "x")
    assert first == cache.fingerprint((file,), "x") != cache.fingerprint((file,), "y")
    file.write_text("other")
    assert cache.fingerprint((file,), "x") != first
    assert cache.fingerprint((tmp_path,), "x") != first
