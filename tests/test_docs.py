"""The documentation is true: its blocks run, links lead somewhere, settings exist, pages made from code are current."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml

from freshet.config import SECTIONS
from tests.snippets import INCLUDED, ROOT, RUN, SHOWN, blocks, run_page

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
NAMES = [str(page.relative_to(DOCS)) for page in PAGES]
WITH_CODE = [page for page in (README, *PAGES) if any(block.language in RUN for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_runs(page: Path, tmp_path: Path, monkeypatch) -> None:
    there = [b for b in blocks(page) if b.language in RUN and not b.illustration and not b.included]
    torch.manual_seed(0)
    assert run_page(page, monkeypatch, tmp_path) == len(there)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        known = (INCLUDED,) if block.included else (*RUN, *SHOWN)
        assert block.language in known, f"{page.name}, line {block.line}: {block.language or 'no language'}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_included_files_are_examples_that_are_tested(page: Path) -> None:
    for block in blocks(page):
        if block.included:
            assert block.included.startswith("examples/") and (ROOT / block.included).is_file(), block.included


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_linked_file_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_setting_it_names_exists(page: Path) -> None:
    """`run.until` and the like, in backticks; sections whose keys are free (method, model) are left out, and so are
    modules (`training.trip`) and files (`fleet.csv`)."""
    closed = {name: set(model.model_fields) for name, model in SECTIONS.items() if name != "model"}
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for section, key in re.findall(r"`(training|fleet|data|run)\.([a-z_]+)(?![a-z_(.])", text):
        module = ROOT / "src" / "freshet" / section / f"{key}.py"
        assert key in {*closed[section], "csv", "py"} or module.is_file(), f"{page.name} names {section}.{key}"


def test_the_pages_that_are_made_from_the_code_are_up_to_date() -> None:
    for path, page in runpy.run_path(str(ROOT / "scripts" / "pages.py"))["PAGES"].items():
        assert path.read_text(encoding="utf-8") == page(), f"{path.name}: run: python scripts/pages.py"


def test_every_kind_of_event_is_explained() -> None:
    from freshet.core.events import KINDS

    text = (DOCS / "run-directory.md").read_text()
    for kind, event in KINDS.items():
        (row,) = re.findall(rf"^\| `{kind}` \|.*$", text, re.MULTILINE)
        own = set(event._fields) - {"device", "trip", "numbers", "k", "round"}
        missing = {key for key in own if f"`{key}`" not in row}
        assert not missing, f"{kind}: {missing}"


def test_the_navigation_has_every_page_and_no_other() -> None:
    assert set(_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == set(NAMES)


def _pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]  # type: ignore[attr-defined]
