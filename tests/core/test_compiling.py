"""Compiled loops work with and without a cache on disk."""

from pickle import UnpicklingError

import pytest

from freshet.core import compiling


@pytest.mark.parametrize("problem", [RuntimeError("no locator"), EOFError(), OSError("disk full"), UnpicklingError()])
def test_a_cache_that_does_not_work_is_done_without(problem, monkeypatch):
    def njit(signature, cache=False, **_):
        def compiled(loop):
            if cache:
                raise problem
            return loop

        return compiled

    monkeypatch.setattr(compiling, "njit", njit)

    def loop(x: float) -> float:
        return x

    assert compiling.compiled("f8(f8)")(loop) is loop
