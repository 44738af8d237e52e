"""One palette for paper and page; a method keeps its colour."""

import re
from importlib.resources import files

from freshet.experiments.cells import METHODS
from freshet.report.palette import COLOURS, LIGHT, ORDER, dash, paint, styles


def test_the_papers_methods_have_colours_of_their_own():
    assert ORDER == METHODS and len(set(LIGHT)) == COLOURS == len(METHODS)
    assert styles(METHODS) == list(range(12))


def test_a_method_keeps_its_colour_whoever_is_with_it():
    assert styles(["fedavg", "fedasmu"]) == [ORDER.index("fedavg"), 0]
    assert styles(["fedasmu", "fedasmu-da", "fedavg", "mine"]) == [0, 1, 7, 2]


def test_namesakes_and_many_lines_are_told_apart():
    assert len(set(styles(["fedasmu"] * 30))) == 30
    assert dash(0) == "solid" and dash(COLOURS) == "dash" and paint(COLOURS) == paint(0)


def test_the_page_has_the_same_colours():
    script = (files("freshet.report") / "assets" / "theme.js").read_text()
    light, dark = re.findall(r"c: \[(.*?)\]", script)
    assert tuple(re.findall(r"#[0-9a-f]{6}", light)) == LIGHT
    assert len(set(re.findall(r"#[0-9a-f]{6}", dark))) == COLOURS
