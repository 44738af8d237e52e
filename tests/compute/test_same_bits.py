"""Swapping the executor never changes a result: the same log, byte for byte, and the same final weights."""

import pytest

from .helpers import METHODS

UNTIL = 60.0


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_processes_give_the_same_bits_as_one_process(federate, finished, pool_of, tmp_path, method, workers):
    alone = finished(method)
    result = federate(method).run(UNTIL, out=tmp_path / "run", pool=pool_of(workers))
    assert (result.directory / "events.jsonl").read_bytes() == (alone.directory / "events.jsonl").read_bytes()
    assert result.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert result.summary["aggregations"] > 3
