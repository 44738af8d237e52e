"""``freshet show`` on a run that never came to its end, and folders that cannot be written."""

import shutil
from pathlib import Path

import pytest

from freshet import ConfigError
from freshet.cli.util import make_writable, unused_name


@pytest.fixture
def killed(finished, tmp_path) -> Path:
    """What `kill -9` leaves: no summary, no model, and a line that was cut off."""
    place = tmp_path / "killed"
    shutil.copytree(finished("fedasmu").directory, place)
    for name in ("summary.json", "model.safetensors"):
        (place / name).unlink()
    log = (place / "events.jsonl").read_bytes()
    (place / "events.jsonl").write_bytes(log[:-20])
    return place


def test_a_killed_run_shows_what_is_there(command, killed, finished):
    done = command("show", killed)
    result = finished("fedasmu")
    assert done.code == 0
    assert "was killed" in done.out and "60 s of 60 s" in done.out
    assert f"accuracy {result.accuracy[-1]:.3f} at 60 s" in done.out
    assert f"{result.summary['uploads']} upload" in done.out and "lambda0" in done.out
    assert f"freshet resume {killed}" in done.out
    shutil.rmtree(killed / "checkpoint")
    assert f"freshet run --config {killed}/config.toml (no checkpoint yet)" in command("show", killed).out


def test_a_run_that_was_killed_at_once_shows_its_settings(command, killed):
    for name in ("events.jsonl", "metrics.jsonl"):
        (killed / name).unlink()
    done = command("show", killed)
    assert done.code == 0
    assert done.out.count("none yet") == 2 and "lambda0" in done.out


def test_a_damaged_log_is_said(command, killed):
    lines = (killed / "events.jsonl").read_text().splitlines()
    (killed / "events.jsonl").write_text("\n".join([*lines[:3], "nonsense", *lines[4:]]) + "\n")
    assert "events.jsonl is damaged at line 4" in command("show", killed).out


# ---- folders


LINES = [
    ["run", "-m", "fedavg", "--until", "5"],
    ["compare", "-m", "fedavg", "--seeds", "1", "--until", "5"],
    ["paper", "ablation", "--scale", "0.01", "--seeds", "1"],
    ["paper", "theory", "--scale", "0.01"],
    ["demo", "--until", "5s"],
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line[:2]))
def test_a_default_folder_that_cannot_be_written_is_one_sentence(command, line):
    Path("runs").write_text("a file in the way")
    done = command(*line)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "runs" in done.err and "cannot be written (Not a directory)" in done.err and "another" in done.err


def test_a_folder_without_permission_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(
        ConfigError, match=r"^--out: .* cannot be written \(Permission denied\); choose another folder$"
    ):
        make_writable(tmp_path / "new")


def test_a_taken_folder_gets_a_number(tmp_path):
    assert unused_name(tmp_path / "a") == tmp_path / "a"
    for name in ("a", "a-2"):
        (tmp_path / name).mkdir()
    assert unused_name(tmp_path / "a") == tmp_path / "a-3"
