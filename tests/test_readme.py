"""The README keeps its promises."""

import re
from pathlib import Path

from tests.snippets import ROOT, blocks, run_python

PAGE = ROOT / "README.md"
README = PAGE.read_text()


def test_the_python_snippet_runs_as_printed_and_gives_the_printed_output(tmp_path: Path, monkeypatch, capsys) -> None:
    (snippet,) = (block for block in blocks(PAGE) if block.language == "python")
    (printed,) = (block for block in blocks(PAGE) if block.language == "text")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    run_python(snippet, names, PAGE)
    lines, given = printed.body.splitlines(), capsys.readouterr().out.splitlines()
    assert (
        [line.split()[0] for line in given]
        == [line.split()[0] for line in lines]
        == ["fedavg", "fedbuff", "fedasmu-fresh"]
    )
    # The last digits differ between machines: 2 points, and one test (10 s) of the time to 0.8.
    for line, expected in zip(given, lines, strict=True):
        for value, wanted, tolerance in zip(_numbers(line), _numbers(expected), (0.02, 0.0, 10.0), strict=True):
            assert abs(value - wanted) <= tolerance + 1e-9, f"{line!r}, printed is {expected!r}"
    assert names["result"].directory.joinpath("summary.json").is_file()


def _numbers(line: str) -> list[float]:
    """The numbers of a line of output. ``None`` seconds count as 0."""
    return [
        float(word) for word in re.findall(r"(?<![\w-])[0-9.]+(?=\W|$)", line.replace("None", "0").replace(",", " "))
    ]


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


def test_the_number_of_methods_is_true() -> None:
    from freshet.methods import registry

    for page in (README, (ROOT / "docs" / "index.md").read_text()):
        assert re.search(r"It has (\d+) methods", page)[1] == str(len(registry()))
