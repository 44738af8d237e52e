"""The worker's host: preloaded kernels."""

import numba
import pytest

from freshet.compute.host import KernelNotCached, forbid_compiling


def test_a_kernel_that_is_not_cached_is_not_compiled_before_a_fork():
    with forbid_compiling(), pytest.raises(KernelNotCached):
        numba.njit("f8(f8)")(lambda x: x + 1.0)
    assert numba.njit("f8(f8)")(lambda x: x + 1.0)(1.0) == 2.0
