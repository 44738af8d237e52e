"""What pages show beside what is run: files that only the site puts in, and what commands print."""

import re

import pytest
from typer.testing import CliRunner

from freshet.cli.app import app
from tests.snippets import blocks
from tests.test_docs import DOCS, NAMES, PAGES


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_file_that_only_the_site_puts_in_is_linked_above(page) -> None:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.included:
            (place,) = re.findall(rf'<a href="([^"]+)"><code>{block.included}</code></a>', text)
            assert (page.parent / place).is_file() and text.index(place) < text.index(f'--8<-- "{block.included}"')


def test_the_first_run_prints_what_the_page_shows(finished, monkeypatch) -> None:
    """The headings and the sentence of the audit; numbers of five minutes are not run again here."""
    monkeypatch.setenv("COLUMNS", "80")
    shown, audited = (block.body.splitlines() for block in blocks(DOCS / "start.md") if block.language == "text")
    directory = str(finished("fedasmu").directory)
    heads, cells = (line.split() for line in CliRunner().invoke(app, ["show", directory]).output.splitlines()[:2])
    assert shown[0].split() == heads and shown[1].split()[0] == cells[0]
    said = CliRunner().invoke(app, ["audit", directory]).output.replace(directory, "runs/first")
    assert [re.sub(r"\d+", "N", line) for line in audited] == [re.sub(r"\d+", "N", said.strip())]


def test_the_pages_agree_on_how_many_comparisons_a_folder_serves() -> None:
    for name in ("experiments.md", "howto/compare.md"):
        text = " ".join((DOCS / name).read_text(encoding="utf-8").split())
        assert "a comparison of something else a folder of its own" in text
        assert "many comparisons" not in text and "every comparison a folder" not in text
