"""One palette for paper and page; a method keeps its colour."""

import json
import re
from importlib.resources import files
from pathlib import Path

from freshet.methods import registry
from freshet.paper.cells import METHODS
from freshet.report.page import SCRIPTS, render
from freshet.report.palette import COLOURS, LIGHT, ORDER, THEMES, dash, paint, styles, variables


def test_each_method_of_the_paper_has_its_own_colour():
    assert ORDER[:12] == METHODS and len(set(LIGHT)) == COLOURS == len(METHODS)
    assert styles(METHODS) == list(range(12))


def test_other_methods_have_distinct_lines():
    assert set(ORDER) == set(registry())
    lines = [(paint(style), dash(style)) for style in styles(ORDER)]
    assert len(set(lines)) == len(ORDER), "a colour and a dash of its own"
    assert [line[1] for line in lines] == ["solid"] * 12 + ["dash"] * 12 + ["dot"] * (len(ORDER) - 24)


def test_a_method_keeps_its_colour_beside_any_others():
    assert styles(["fedavg", "fedasmu"]) == [ORDER.index("fedavg"), 0]
    assert styles(["fedasmu", "fedasmu-da", "fedavg", "mine"]) == [0, 1, 7, 2]


def test_equal_names_and_many_lines_have_distinct_styles():
    assert len(set(styles(["fedasmu"] * 30))) == 30
    assert dash(0) == "solid" and dash(COLOURS) == "dash" and paint(COLOURS) == paint(0)


def test_the_page_uses_only_palette_colours():
    """Scripts and styles name colours; the page is given both themes of the palette."""
    assets = files("freshet.report") / "assets"
    for name in (*SCRIPTS, "page.css", "page.html"):
        assert re.findall(r"#[0-9a-f]{3,8}\b", (assets / name).read_text()) == [], name
    page = render(None)
    found = re.search(r'<script type="application/json" id="palette">(.*?)</script>', page, re.S)
    assert found is not None and json.loads(found[1]) == THEMES
    assert variables() in page


def test_both_themes_have_the_same_names_and_twelve_colours():
    light, dark = THEMES["light"], THEMES["dark"]
    assert light.keys() == dark.keys()
    assert [len(set(theme["c"])) for theme in (light, dark)] == [COLOURS, COLOURS]
    colours = [
        colour
        for theme in (light, dark)
        for item in theme.values()
        for colour in ([item] if isinstance(item, str) else item)
    ]
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_every_name_that_styles_and_scripts_use_is_in_the_palette():
    assets = files("freshet.report") / "assets"
    names = set(re.findall(r"var\(--([a-z-]+)\)", (assets / "page.css").read_text())) - {"shadow"}
    for script in SCRIPTS:
        names |= set(re.findall(r"\btheme\.([a-z]+)\b", (assets / script).read_text()))
    assert names <= THEMES["light"].keys()


def test_figures_use_only_palette_colours():
    """Neither reports nor experiments nor the terminal's pictures: one palette for all."""
    sources = [path for path in Path(str(files("freshet"))).rglob("*.py") if path.name != "palette.py"]
    assert [path.name for path in sources if re.search(r"[\"']#[0-9a-f]{6}[\"']", path.read_text())] == []


def test_lines_of_the_page_can_be_read():
    ours = [asset for asset in (files("freshet.report") / "assets").iterdir() if not asset.name.startswith("plotly")]
    assert len(ours) > 5
    for asset in ours:
        assert max(map(len, asset.read_text().splitlines())) < 120, asset.name
