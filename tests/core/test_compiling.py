"""Compiled loops work with and without a cache on disk."""

import os
import subprocess
import sys
from pickle import UnpicklingError

import pytest
from numba import njit

from freshet.core import compiling


@pytest.mark.parametrize("problem", [RuntimeError("no locator"), EOFError(), OSError("disk full"), UnpicklingError()])
def test_loops_compile_without_a_working_cache(problem, monkeypatch):
    def njit(signature, cache=False, **_):
        def compiled(loop):
            if cache:
                raise problem
            return loop

        return compiled

    monkeypatch.setattr(compiling, "njit", njit)

    def loop(x: float) -> float:
        return x

    assert compiling.compile_loop("f8(f8)")(loop) is loop


def test_compiling_is_announced_once_and_loading_is_not():
    said: list[str] = []
    with compiling.announce_compiling(said.append):
        assert said == []
        one = njit("f8(f8)")(lambda x: x + 1.0)
        njit("f8(f8)")(lambda x: x + 2.0)
    assert said == ["compiling loops, once, about 10 s"]
    with compiling.announce_compiling(said.append):
        assert one(1.0) == 2.0
    assert len(said) == 1
    njit("f8(f8)")(lambda x: x + 3.0)  # the listener is gone
    assert len(said) == 1


def test_a_run_announces_compiling_only_without_a_cache(tmp_path):
    line = [sys.executable, "-c", "from freshet.core.vectors import load_kernels; load_kernels(print)"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240, check=True).stdout
        for _ in range(2)
    )
    assert first == f"{compiling.COMPILING}\n" and second == ""
