"""The README keeps its promises."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_snippet_runs_as_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    snippet = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["result"].accuracy[-1] > 0.6
    assert names["result"].directory.joinpath("summary.json").is_file()
    assert names["model"](__import__("torch").zeros(1, 64)).shape == (1, 10)
    assert "accuracy" in capsys.readouterr().out


def test_every_linked_file_is_there() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


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


def test_the_page_of_settings_is_up_to_date() -> None:
    import runpy

    made = runpy.run_path(str(ROOT / "scripts" / "configuration.py"))
    assert made["PAGE"].read_text() == made["page"](), "run: python scripts/configuration.py"
