"""Compiled loops work with and without a cache on disk."""

import os
import subprocess
import sys
from pickle import UnpicklingError

import pytest

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

    assert compiling.compile_loop("f8(f8)")(loop).machine_code() is loop


def double(x: float) -> float:
    return 2.0 * x


def quadruple(x: float) -> float:
    return double(double(x))


def test_a_loop_is_compiled_at_its_first_call_and_then_takes_its_place(monkeypatch):
    here = sys.modules[__name__]
    for name in ("double", "quadruple"):
        monkeypatch.setattr(here, name, compiling.compile_loop("f8(f8)")(getattr(here, name)))
    lazy = {loop.loop.__name__: loop for loop in compiling.loops_of(here)}
    assert set(lazy) == {"double", "quadruple"}
    assert quadruple(3.0) == 12.0, "it compiles what it calls"
    assert compiling.loops_of(here) == []
    assert [type(loop).__name__ for loop in (double, quadruple)] == ["CPUDispatcher"] * 2
    assert lazy["double"](3.0) == 6.0, "who holds the object still gets the loop"
    assert lazy["double"].machine_code() is double


def test_a_run_compiles_only_what_it_needs(tmp_path):
    program = "import numpy as np; from freshet.core.vectors import dot; v = np.ones(3, np.float32); print(dot(v, v))"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    line = [sys.executable, "-c", program]
    assert subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout == "3.0\n"
    assert [path.name.split("-")[0] for path in tmp_path.rglob("*.nbc")] == ["kernels.dot"]


def test_compiling_is_announced_once_and_loading_is_not():
    said: list[str] = []
    one, two, three = (compiling.CompiledLoop(eval(f"lambda x: x + {n}.0"), "f8(f8)") for n in (1, 2, 3))
    compiling.tell_of_compiling(said.append)
    assert said == []
    assert (one(1.0), two(1.0)) == (2.0, 3.0)
    assert said == ["compiling loops, once, about 10 s"]
    compiling.tell_of_compiling(said.append)
    assert one(1.0) == 2.0
    assert len(said) == 1
    compiling.tell_of_compiling(None)
    assert three(1.0) == 4.0
    assert len(said) == 1


def test_a_run_announces_compiling_only_without_a_cache(tmp_path):
    program = "import numpy as np; from freshet.core.vectors import dot, load_kernels; load_kernels(print); "
    line = [sys.executable, "-c", program + "v = np.ones(3, np.float32); dot(v, v)"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240, check=True).stdout
        for _ in range(2)
    )
    assert first == f"{compiling.COMPILING}\n" and second == ""
