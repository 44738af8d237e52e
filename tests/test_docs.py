"""The documentation is true: blocks run, links and settings exist, pages written from code are current.

Blocks run in a short form (tests/snippets.py). Blocks marked ``not run`` need servers, a network, a GPU or other
machines. They are checked without running:

- freshet commands go through the real parser; their methods, cells and settings must exist, and so must names of
  ``pip install``, targets of make, and benchmarks with their options;
- Python is compiled, freshet imports are made, and calls of imported names must fit the signature.

These checks do not cover whether a block would succeed, other programs (``FOREIGN``), variables of unknown type, and
imports that need an extra that is not installed.
"""

import ast
import importlib
import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest
import torch
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.config import SECTIONS
from freshet.methods import class_and_preset
from freshet.paper.cells import CELLS
from tests.snippets import INCLUDED, ROOT, RUN, SHOWN, Block, blocks, distributions, run_page

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
NAMES = [str(page.relative_to(DOCS)) for page in PAGES]
#: First words of other programs' commands, which are not checked.
FOREIGN = ("ray", "flwr", "python", "python3", ".", "docker", "helm", "env", "sudo", "scripts/try_wheel.sh")
#: What `pip install` may name besides our distribution.
PACKAGES = ("torch", ".")
#: Lines of an indented block that could be run and so need a fence.
RUNNABLE = re.compile(
    r" {4,}(\$ |freshet |pip |make |flwr |import \w|from [\w.]+ import |def \w|class \w|\w+ = ([A-Z]\w+|\w+\.\w+)\()"
)
WITH_CODE = [page for page in (README, *PAGES) if any(block.language in RUN for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch) -> None:
    runnable = [b for b in blocks(page) if b.language in RUN and not b.illustration and not b.included]
    torch.manual_seed(0)
    assert run_page(page, monkeypatch, tmp_path) == len(runnable)


@pytest.mark.parametrize("page", (README, *PAGES), ids=["README.md", *NAMES])
def test_blocks_that_are_not_run_are_valid(page: Path) -> None:
    names: dict[str, Thing | None] = {}
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.language == "python" and not block.included:
            for source in (block.setup, block.body):
                check_python(source, names, where)
        elif block.illustration and block.language in RUN:
            for words in commands(block):
                check_command(words, f"{where}: {shlex.join(words)}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_runnable_lines_have_a_fence(page: Path) -> None:
    """Four spaces also make code in Markdown, which no test checks. Formulas may use them."""
    fenced = re.sub(r"^(```+).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in fenced.splitlines() if RUNNABLE.match(line)] == []


@pytest.mark.parametrize("page", (README, *PAGES), ids=["README.md", *NAMES])
def test_named_scripts_exist_and_have_the_options(page: Path) -> None:
    """For example `python benchmarks/scale.py server --hours 4`, to the end of the line or of the backticks."""
    text = page.read_text(encoding="utf-8")
    for name, rest in re.findall(r"\bpython ((?:benchmarks|scripts)/\w+\.py)([^`\n]*)", text):
        assert (ROOT / name).is_file(), f"{page.name} names {name}"
        script = (ROOT / name).read_text(encoding="utf-8")
        for option in re.findall(r"(?<=\s)--[a-z-]+", rest.split("#")[0]):
            assert f'"{option}"' in script, f"{page.name}: {name} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_names_its_language(page: Path) -> None:
    for block in blocks(page):
        known = (INCLUDED,) if block.included else (*RUN, *SHOWN)
        assert block.language in known, f"{page.name}, line {block.line}: {block.language or 'no language'}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_included_files_are_tested_examples(page: Path) -> None:
    for block in blocks(page):
        if block.included:
            assert block.included.startswith("examples/") and (ROOT / block.included).is_file(), block.included


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_linked_file_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_named_file_exists(page: Path) -> None:
    """`tests/sim/test_driver_resume.py`, `benchmarks/peers.md`; for tests, the name is enough: `test_fuzz.py`."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|src|benchmarks|scripts|examples|results)/[^`\s:]*)", text):
        assert "..." in name or any(ROOT.glob(name.rstrip("/"))), f"{page.name} names {name}"
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert any((ROOT / "tests").rglob(name)), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_named_setting_exists(page: Path) -> None:
    """Settings such as `run.until` in backticks exist. Method and model have free keys and are not checked, nor are
    modules (`training.trip`) and files (`fleet.csv`)."""
    closed = {name: set(model.model_fields) for name, model in SECTIONS.items() if name != "model"}
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for section, key in re.findall(r"`(training|fleet|data|run)\.([a-z_]+)(?![a-z_(.])", text):
        module = ROOT / "src" / "freshet" / section / f"{key}.py"
        assert key in {*closed[section], "csv", "py"} or module.is_file(), f"{page.name} names {section}.{key}"


def test_pages_written_from_the_code_are_current() -> None:
    for path, page in runpy.run_path(str(ROOT / "scripts" / "pages.py"))["PAGES"].items():
        assert path.read_text(encoding="utf-8") == page(), f"{path.name}: run: python scripts/pages.py"


def test_every_event_kind_is_explained() -> None:
    from freshet.core.events import KINDS

    text = (DOCS / "run-directory.md").read_text()
    for kind, event in KINDS.items():
        (row,) = re.findall(rf"^\| `{kind}` \|.*$", text, re.MULTILINE)
        own = set(event._fields) - {"device", "trip", "numbers", "k", "round"}
        missing = {key for key in own if f"`{key}`" not in row}
        assert not missing, f"{kind}: {missing}"


def test_the_navigation_lists_exactly_the_pages() -> None:
    assert set(_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == set(NAMES)


def _pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_file_that_the_site_includes_is_linked_above(page) -> None:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.included:
            (place,) = re.findall(rf'<a href="([^"]+)"><code>{block.included}</code></a>', text)
            assert (page.parent / place).is_file() and text.index(place) < text.index(f'--8<-- "{block.included}"')


def test_the_first_run_prints_what_start_md_shows(finished, monkeypatch) -> None:
    """Compare the headings and the sentence of the audit. The numbers would take five minutes."""
    monkeypatch.setenv("COLUMNS", "80")
    shown, audited = (block.body.splitlines() for block in blocks(DOCS / "start.md") if block.language == "text")
    directory = str(finished("fedasmu").directory)
    heads, cells = (line.split() for line in CliRunner().invoke(app, ["show", directory]).output.splitlines()[:2])
    assert shown[0].split() == heads and shown[1].split()[0] == cells[0]
    said = CliRunner().invoke(app, ["audit", directory]).output.replace(directory, "runs/first")
    assert [re.sub(r"\d+", "N", line) for line in audited] == [re.sub(r"\d+", "N", said.strip())]


def test_the_pages_agree_that_a_folder_holds_one_comparison() -> None:
    for name in ("experiments.md", "howto/compare.md"):
        text = " ".join((DOCS / name).read_text(encoding="utf-8").split())
        assert "Use another folder for another comparison" in text
        assert "many comparisons" not in text and "every comparison a folder" not in text


# ---- checks of blocks that are not run


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a block; ``&&`` separates commands."""
    lines = block.body.replace("\\\n", " ").splitlines()
    for line in lines:
        if block.language == "bash" or line.startswith("$ "):
            words = shlex.split(line.removeprefix("$ "), comments=True)
            cuts = [-1, *(place for place, word in enumerate(words) if word == "&&"), len(words)]
            yield from (words[a + 1 : b] for a, b in pairwise(cuts) if b > a + 1)


def check_command(words: list[str], where: str) -> None:
    match words:
        case ["freshet", *rest]:
            check_freshet_command(rest, where)
        case ["pip", "install", *rest]:
            named = [word for before, word in zip(["", *rest], rest, strict=False) if not before.startswith("-")]
            assert {word for word in named if word[0] != "-"} <= {*distributions(), *PACKAGES}, where
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), where
        case _:
            assert words[0] in FOREIGN, where


def check_freshet_command(words: list[str], where: str) -> None:
    """Parse the command, then check its method, cell and settings."""
    command: Any = get_command(app)
    while words and words != ["--version"] and hasattr(command, "commands"):
        assert words[0] in command.commands, f"{where}: there is no {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if words == ["--version"]:
        return
    given = command.make_context(command.name, list(words)).params
    if given.get("method") and ".py:" not in given["method"]:
        class_and_preset(given["method"])
    assert not given.get("cell") or given["cell"] in CELLS, where
    for setting in given.get("settings", ()):
        section, _, key = setting.partition("=")[0].partition(".")
        free = section in ("method", "model")
        assert free or key in SECTIONS[section].model_fields, f"{where}: there is no {section}.{key}"


class Thing(NamedTuple):
    """A module, class or function that a block imports; with ``made``, an instance of the class."""

    what: Any
    made: bool = False


def check_python(source: str, names: dict[str, Thing | None], where: str) -> None:
    """Compile the source, make its imports, and check its calls against signatures. Updates `names`."""
    for statement in ast.parse(source).body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names.update(import_names(node, where))
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                check_call(node, names, where)
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = infer(value, names, where)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] = None


def import_names(node: ast.Import | ast.ImportFrom, where: str) -> Iterator[tuple[str, Thing | None]]:
    for alias in node.names:
        path = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        name = alias.asname or (alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name)
        try:
            module: Any = importlib.import_module(path if isinstance(node, ast.Import) else str(node.module))
        except ModuleNotFoundError as error:  # the reader's module, or an extra that is not installed
            assert str(error.name).partition(".")[0] != "freshet", f"{where}: there is no {error.name}"
            yield name, None
            continue
        if isinstance(node, ast.ImportFrom):
            if not hasattr(module, alias.name):
                importlib.import_module(path)
            yield name, Thing(getattr(module, alias.name))
        else:
            yield name, Thing(module if alias.asname else importlib.import_module(name))


def infer(node: ast.expr, names: dict[str, Thing | None], where: str) -> Thing | None:
    """Return what an expression is, if imports and annotations tell."""
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=value, attr=name):
            of = infer(value, names, where)
            if of is None:
                return None
            if of.made and re.search(rf"\bself\.{name}\b.* = |^    {name}:", inspect.getsource(of.what), re.MULTILINE):
                return None  # an attribute of unknown type
            assert hasattr(of.what, name), f"{where}: {of.what.__name__} has no {name}"
            return Thing(getattr(of.what, name))
        case ast.Call():
            return check_call(node, names, where)
    return None


def check_call(node: ast.Call, names: dict[str, Thing | None], where: str) -> Thing | None:
    """Check a call against the signature and return its result, if known."""
    function = infer(node.func, names, where)
    if function is None or function.made or not callable(function.what):
        return None
    what = function.what
    if not any(isinstance(a, ast.Starred) for a in node.args) and all(k.arg for k in node.keywords):
        on_instance = isinstance(node.func, ast.Attribute) and bool(
            (of := infer(node.func.value, names, where)) and of.made
        )
        try:
            signature = inspect.signature(what)
        except ValueError:  # written in C
            return None
        try:
            signature.bind(*[0] * (len(node.args) + on_instance), **{str(k.arg): 0 for k in node.keywords})
        except TypeError as error:
            raise AssertionError(f"{where}: {ast.unparse(node)}: {error}") from None
    try:
        gives = what if inspect.isclass(what) else get_type_hints(what).get("return")
    except (NameError, TypeError):
        return None
    return Thing(gives, made=True) if inspect.isclass(gives) and gives.__module__.startswith("freshet") else None
