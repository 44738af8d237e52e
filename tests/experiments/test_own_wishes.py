"""``freshet.compare``: what ``make`` says of checkpoints holds, and what is no function is refused."""

from pathlib import Path

import pytest

import freshet
from freshet import ConfigError

from .test_own import make


@pytest.mark.parametrize(("run", "kept"), [({}, False), ({"keep_checkpoint": True}, True)])
def test_runs_keep_their_checkpoints_if_asked(run: dict, kept: bool, tmp_path: Path):
    found = freshet.compare(lambda method, seed: make(method, seed, run=run), ["fedavg"], seeds=1, out=tmp_path)
    assert found.complete and bool(list(tmp_path.glob("runs/*/checkpoint/*"))) is kept


@pytest.mark.parametrize("given", ["x", None, 3])
def test_what_is_no_function_is_refused(given, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^make: must be a function of \(method, seed\), but .* was given"):
        freshet.compare(given, ["fedavg"], seeds=1, out=tmp_path)
