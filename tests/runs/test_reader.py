"""Reading a run directory: broken files are one sentence, and growing files are followed."""

import json

import pytest

from freshet.errors import RunError
from freshet.runs.reader import RunDirectory


@pytest.mark.parametrize("content", ["{", "[1, 2]", "nonsense", '{"a": 1}\n3'])
def test_an_error_names_a_line_that_is_not_an_object(finished, tmp_path, content):
    (tmp_path / "config.toml").write_text((finished("fedavg").directory / "config.toml").read_text())
    (tmp_path / "events.jsonl").write_text(content + "\n")
    with pytest.raises(RunError, match=r"events\.jsonl, line \d"):
        list(RunDirectory(tmp_path).events())


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\n", b"[" * 200_000 + b"\n"], ids=["not utf-8", "deeply nested"])
def test_a_hostile_line_is_one_sentence(finished, tmp_path, content):
    (tmp_path / "config.toml").write_text((finished("fedavg").directory / "config.toml").read_text())
    (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"events\.jsonl"):
        list(RunDirectory(tmp_path).events())


def test_a_folder_that_is_not_a_run_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match="is not a run directory: the folder does not exist"):
        RunDirectory(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"config\.toml"):
        RunDirectory(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_broken_summary_is_one_sentence(tmp_path, content):
    (tmp_path / "config.toml").touch()
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(RunError, match=r"summary\.json"):
        RunDirectory(tmp_path).summary()


def test_metrics_are_followed_while_they_grow_and_read_again_after_a_cut(tmp_path):
    (tmp_path / "config.toml").touch()
    path, rows = tmp_path / "metrics.jsonl", [json.dumps({"time": float(time)}) + "\n" for time in range(3)]
    followed = RunDirectory(tmp_path).follow_metrics()
    assert not followed.read()
    path.write_text(rows[0] + rows[1][:5])
    assert followed.read() and followed.rows == [{"time": 0.0}] and not followed.read()
    path.write_text("".join(rows))
    assert followed.read() and [row["time"] for row in followed.rows] == [0.0, 1.0, 2.0]
    path.write_text(rows[0])
    assert followed.read() and followed.rows == [{"time": 0.0}]
    path.write_text(rows[0] + "nonsense\n")
    followed.read()
    assert followed.note == "metrics.jsonl is damaged at line 2; what follows is not shown"


def test_summary_and_checkpoint_are_found_if_they_exist(finished, tmp_path):
    run = RunDirectory(finished("fedavg").directory)
    assert run.has_summary() and run.has_checkpoint() and run.finished()
    (tmp_path / "config.toml").touch()
    empty = RunDirectory(tmp_path)
    assert not empty.has_summary() and not empty.has_checkpoint() and not empty.finished() and empty.world() is None
