"""Run the command through its entry point."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from freshet.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Callable[..., Done]:
    """Run the command in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["freshet", *(str(a) for a in arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call
