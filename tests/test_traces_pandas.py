"""Traces as pandas writes them: presence as 1.0 and 0.0."""

import json

import pytest

from freshet.errors import ConfigError
from freshet.sim.traces import read_trace


@pytest.mark.parametrize("form", ["csv", "json"])
def test_presence_may_be_written_as_a_fraction(form, tmp_path):
    rows = [{"device": k, "seconds_per_sample": 0.1, "available": here} for k, here in enumerate((1.0, 0.0))]
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path = tmp_path / f"trace.{form}"
    path.write_text(json.dumps(rows) if form == "json" else "\n".join(lines))
    assert [history.available(0) for history in read_trace(path).histories] == [True, False]


@pytest.mark.parametrize("here", ["0.5", "1.00001", "2", "nan"])
def test_no_other_number_is_a_presence(here, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"device,seconds_per_sample,available\n0,0.1,{here}\n")
    with pytest.raises(ConfigError, match="must be 1 or 0"):
        read_trace(path)
