"""Output folders of commands."""

from pathlib import Path

import pytest

from freshet import ConfigError
from freshet.cli.util import make_writable, unused_name

LINES = [
    ["run", "-m", "fedavg", "--until", "5"],
    ["compare", "-m", "fedavg", "--seeds", "1", "--until", "5"],
    ["paper", "ablation", "--scale", "0.01", "--seeds", "1"],
    ["paper", "theory", "--scale", "0.01"],
    ["demo", "--until", "5s"],
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line[:2]))
def test_a_default_folder_that_is_not_writable_gives_one_sentence(command, line):
    Path("runs").write_text("a file in the way")
    done = command(*line)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "runs" in done.err and "cannot be written (Not a directory)" in done.err and "another" in done.err


def test_a_folder_without_permission_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(
        ConfigError, match=r"^--out: .* cannot be written \(Permission denied\); choose another folder$"
    ):
        make_writable(tmp_path / "new")


def test_an_existing_folder_gets_a_number(tmp_path):
    assert unused_name(tmp_path / "a") == tmp_path / "a"
    for name in ("a", "a-2"):
        (tmp_path / name).mkdir()
    assert unused_name(tmp_path / "a") == tmp_path / "a-3"
