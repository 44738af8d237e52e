"""Swapping the executor never changes a result: the same log, byte for byte, and the same final weights."""

import pytest

from .helpers import METHODS, UNTIL, assert_same_run, federation


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_processes_give_the_same_bits_as_one_process(serial_run, pool_of, tmp_path, method, workers):
    result = federation(method).run(UNTIL, out=tmp_path / "run", pool=pool_of(workers))
    assert_same_run(result, serial_run(method))
