"""Package metadata, installation lines and citation."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from freshet import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = (ROOT / "CITATION.cff").read_text()


def test_the_distribution_is_freshet_fl_and_the_command_freshet():
    assert PROJECT["name"] == "freshet-fl"
    assert list(PROJECT["scripts"]) == ["freshet"]


def test_every_pip_install_line_names_the_distribution_and_an_existing_extra():
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    lines = {(file.name, line) for file in files for line in re.findall(r"pip install '[^']*'", file.read_text())}
    assert len(lines) >= 6
    wrong = [
        line
        for line in lines
        if not (m := re.fullmatch(r"pip install 'freshet-fl\[(\w+)\]'", line[1]))
        or m.group(1) not in PROJECT["optional-dependencies"]
    ]
    assert wrong == []


def test_installing_shows_progress():
    """A dot per second, and pip's own words if it fails."""
    makefile = (ROOT / "Makefile").read_text()
    assert "do printf .; sleep 1; done" in makefile and "cat $(VENV)/pip.log" in makefile
    assert "pip install -q" not in (ROOT / "README.md").read_text()


def test_the_citation_has_this_version():
    fields = dict(line.split(": ", 1) for line in CITATION.splitlines() if re.match(r"[a-z-]+: ", line))
    assert (fields["version"], fields["license"]) == (__version__, PROJECT["license"])
    assert fields["cff-version"] == "1.2.0" and fields["title"] == "Freshet"


@pytest.mark.skipif("FRESHET_PAPER" not in os.environ, reason="FRESHET_PAPER does not name the paper's source")
def test_the_citation_names_the_paper_and_its_authors():
    paper = Path(os.environ["FRESHET_PAPER"]).read_text()
    title = re.search(r"\\title\{(.*?)\}", paper).group(1)
    block = re.search(r"\\author\{(.*?)\n\}", paper, re.DOTALL).group(1)
    authors = [re.sub(r"\\footnotemark\[\d\]|~and~", "", name).strip() for name in block.split(",")]
    cited = re.findall(r"given-names: (.*?), family-names: (.*?)\}", CITATION)
    assert f"title: {title}\n" in CITATION
    assert [" ".join(name) for name in cited] == authors and len(authors) == 7
