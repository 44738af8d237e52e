"""Find and run the fenced blocks of a page: Python as printed, commands in a short form, one folder per page.

A comment right before a block controls it. ``<!-- not run: why -->`` marks an illustration. ``<!-- setup: ... -->``
holds hidden lines that run first: Python, or before a console block commands and ``cp FILE .``.
"""

import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.config import seconds

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|setup):\s(?P<note>[^>]*?)\s-->\n\n?)?"
    r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
#: Languages of blocks to run, and of blocks with nothing to run.
RUN = ("python", "console", "bash")
SHOWN = ("csv", "toml", "json", "yaml", "ini", "text")
#: The language of an included example file. It keeps formatters from treating the file name as code.
INCLUDED = "{ .python }"
#: Commands that are only parsed. They need a network, a browser, other machines, or minutes.
PARSED_ONLY = ("watch", "metrics", "demo", "deploy", "fleet", "paper", "bench")
#: Short runs: a tenth of the time, and few samples.
TIME_SHARE = 0.1
SHORT_OPTIONS = {
    "run": {"--until": "20"},
    "compare": {"--until": "20"},
    "tune": {"--until": "20", "--trials": "2", "--seeds": "1"},
}
SMALL_DATA = ("-s", "data.train_samples=300", "-s", "data.test_samples=100", "--executor", "serial")


class Block(NamedTuple):
    language: str
    body: str
    line: int
    illustration: bool
    setup: str

    @property
    def included(self) -> str | None:
        """The file that the site includes here."""
        found = re.fullmatch(r'--8<-- "(.*)"\n', self.body)
        return found[1] if found else None


def blocks(page: Path) -> Iterator[Block]:
    """Yield all fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("fence")) + 1
        mark, note = found["mark"], found["note"] or ""
        setup = note if mark == "setup" else ""
        yield Block(found["language"].strip(), found["body"], line, mark == "not run", setup)


def run_page(page: Path, patch: pytest.MonkeyPatch, folder: Path) -> int:
    """Run the blocks of a page in this folder and return how many ran."""
    patch.chdir(folder)
    patch.setenv("COLUMNS", "200")
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in blocks(page):
        if block.illustration or block.included or block.language not in RUN:
            continue
        if block.language == "python":
            run_python(block, names, page)
        else:
            run_console(block, page)
        ran += 1
    return ran


def run_python(block: Block, names: dict[str, Any], page: Path) -> None:
    exec(compile(block.setup, f"{page.name}, setup", "exec"), names)
    exec(compile("\n" * block.line + block.body, str(page), "exec"), names)


def run_console(block: Block, page: Path) -> None:
    lines = block.body.replace("\\\n", " ").splitlines()
    if block.language == "console":  # the other lines are output
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in filter(str.strip, [*block.setup.splitlines(), *lines]):
        run_command(shlex.split(line, comments=True), f"{page.name}, line {block.line}: {line}")


def run_command(words: list[str], where: str) -> None:
    """Run a freshet command in this process; check that other commands name existing things."""
    match words:
        case []:  # a comment
            pass
        case ["freshet", *rest]:
            freshet(rest, where)
        case ["cp", name, "."]:
            shutil.copy(ROOT / name, Path.cwd())
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), where
        case ["pip", "install", what]:
            assert what in distributions(), where
        case _:
            raise AssertionError(f"{where}: cannot be checked; mark the block <!-- not run: why -->")


def distributions() -> set[str]:
    """Return the names of our distribution that `pip install` accepts, with extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {project["name"], *(f"{project['name']}[{extra}]" for extra in project["optional-dependencies"])}


def freshet(words: list[str], where: str) -> None:
    short = shorten(words)
    if short is None:
        parse(words, where)
        return
    done = CliRunner().invoke(app, short, catch_exceptions=False)
    assert done.exit_code == 0, f"{where}\nas: freshet {shlex.join(short)}\n{done.output}"


def parse(words: list[str], where: str) -> None:
    """Parse a command without running it."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"{where}: there is no {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if words or not hasattr(command, "commands"):  # a group alone prints its help
        command.make_context(command.name, list(words))


def shorten(words: list[str]) -> list[str] | None:
    """Return a version of the command that takes seconds; None if it can only be parsed."""
    words = [word for word in words if word != "--open" and not word.startswith("[")]
    name = words[0] if words else ""
    if name in PARSED_ONLY or words[:2] == ["data", "get"] or "--cell" in words or "--track" in words:
        return None
    runs = sorted(Path("runs").rglob("summary.json"), key=lambda path: path.stat().st_mtime)
    if any(word.startswith("RUN") for word in words):
        if not runs or name == "resume":  # the runs here are finished
            return None
        words = [str(runs[-1].parent) if word.startswith("RUN") else word for word in words]
    out = [_short_value(before, word) for before, word in zip(["", *words], words, strict=False)]
    for option, value in SHORT_OPTIONS.get(name, {}).items():
        out += [] if option in out else [option, value]
    return out + list(SMALL_DATA) if name in SHORT_OPTIONS else out


def _short_value(option: str, value: str) -> str:
    if option == "--until":
        return f"{TIME_SHARE * seconds(value):g}"
    return {"--seeds": "1", "--trials": "2"}.get(option, value)
