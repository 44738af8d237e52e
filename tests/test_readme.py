"""The README keeps its promises."""

import re
from pathlib import Path

from tests.snippets import ROOT, blocks, run_python

PAGE = ROOT / "README.md"
README = PAGE.read_text()


def test_the_python_snippet_runs_as_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    (snippet,) = (block for block in blocks(PAGE) if block.language == "python")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    run_python(snippet, names, PAGE)
    assert names["result"].accuracy[-1] > 0.6
    assert names["result"].directory.joinpath("summary.json").is_file()
    assert names["model"](__import__("torch").zeros(1, 64)).shape == (1, 10)
    assert "accuracy" in capsys.readouterr().out


def test_every_linked_file_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), f"the README links to {target}"


def test_every_command_it_names_exists() -> None:
    from typer.main import get_command

    from freshet.cli.app import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"^\$ freshet ([a-z]+)", README, re.MULTILINE))
    assert named and named <= known


def test_the_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
