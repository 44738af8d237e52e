"""The fenced blocks of a page, and how they are run: Python as printed, commands in a short form, one folder per page.

A comment right before a block tells more: ``<!-- not run: why -->`` marks an illustration, ``<!-- setup: ... -->``
holds lines that run before it and that a reader does not see (Python; of a console block, commands, and ``cp FILE .``).
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
#: Languages of blocks that are run, and of blocks in which there is nothing to run.
RUN = ("python", "console", "bash")
SHOWN = ("csv", "toml", "json", "yaml", "ini", "text")
#: How a file of examples/ is shown, so that no formatter takes its name for code.
INCLUDED = "{ .python }"
#: Commands that are only parsed: they need a network, a browser, other machines, or minutes.
PARSED = ("watch", "demo", "deploy", "fleet", "paper")
#: A tenth of the time, and few samples.
SHARE = 0.1
BRIEF = {
    "run": {"--until": "20"},
    "compare": {"--until": "20"},
    "tune": {"--until": "20", "--trials": "2", "--seeds": "1"},
}
SMALL = ("-s", "data.train_samples=300", "-s", "data.test_samples=100", "--executor", "serial")


class Block(NamedTuple):
    language: str
    body: str
    line: int
    illustration: bool
    setup: str

    @property
    def included(self) -> str | None:
        """The file whose text stands here when the site is built."""
        found = re.fullmatch(r'--8<-- "(.*)"\n', self.body)
        return found[1] if found else None


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("fence")) + 1
        mark, note = found["mark"], found["note"] or ""
        setup = note if mark == "setup" else ""
        yield Block(found["language"].strip(), found["body"], line, mark == "not run", setup)


def run_page(page: Path, patch: pytest.MonkeyPatch, folder: Path) -> int:
    """Run what can be run on a page, in this folder; returns how many blocks were."""
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
    if block.language == "console":  # what is not typed is what came out
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in filter(str.strip, [*block.setup.splitlines(), *lines]):
        run_command(shlex.split(line, comments=True), f"{page.name}, line {block.line}: {line}")


def run_command(words: list[str], where: str) -> None:
    """One command, in this process; what is not ours is held against what there is."""
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
    """Everything that `pip install` may name of ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {project["name"], *(f"{project['name']}[{extra}]" for extra in project["optional-dependencies"])}


def freshet(words: list[str], where: str) -> None:
    short = shortened(words)
    if short is None:
        parse(words, where)
        return
    done = CliRunner().invoke(app, short, catch_exceptions=False)
    assert done.exit_code == 0, f"{where}\nas: freshet {shlex.join(short)}\n{done.output}"


def parse(words: list[str], where: str) -> None:
    """Hold a command's words against the real parser, and run nothing."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"{where}: there is no {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words))


def shortened(words: list[str]) -> list[str] | None:
    """The same command in a few seconds; None if it can only be parsed."""
    words = [word for word in words if word != "--open" and not word.startswith("[")]
    name = words[0] if words else ""
    if name in PARSED or words[:2] == ["data", "get"] or "--cell" in words or "--track" in words:
        return None
    runs = sorted(Path("runs").rglob("summary.json"), key=lambda path: path.stat().st_mtime)
    if any(word.startswith("RUN") for word in words):
        if not runs or name == "resume":  # what is there has ended
            return None
        words = [str(runs[-1].parent) if word.startswith("RUN") else word for word in words]
    out = [_briefly(before, word) for before, word in zip(["", *words], words, strict=False)]
    for option, value in BRIEF.get(name, {}).items():
        out += [] if option in out else [option, value]
    return out + list(SMALL) if name in BRIEF else out


def _briefly(option: str, value: str) -> str:
    if option == "--until":
        return f"{SHARE * seconds(value):g}"
    return {"--seeds": "1", "--trials": "2"}.get(option, value)
