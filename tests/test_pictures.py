"""The pictures of the report show what the demo gives (scripts/pictures.py writes their numbers down)."""

import json
from pathlib import Path

import pytest
from scripts import pictures

from freshet import Federation, Observer, Stop
from freshet.cli.run import DEMO_METHODS
from freshet.config import resolve

IMAGES = Path(__file__).parent.parent / "docs" / "images"
NUMBERS = json.loads((IMAGES / "report.json").read_text())


def test_the_pictures_are_those_of_the_demo() -> None:
    assert set(NUMBERS["methods"]) == set(DEMO_METHODS)
    finals = [numbers["accuracy"] for numbers in NUMBERS["methods"].values()]
    assert finals == sorted(finals, reverse=True), "the table begins with the best"
    for name in ("report", "report-dark", "report-phone", "report-timeline"):
        assert (IMAGES / f"{name}.png").read_bytes().startswith(b"\x89PNG")


class UntilEarly(Observer):
    """Ends a run after the seconds whose accuracy is written down. What is left of it would change nothing before."""

    def on_progress(self, time: float) -> None:
        if time > pictures.EARLY_SECONDS:
            raise Stop("enough was seen")


@pytest.mark.parametrize("method", DEMO_METHODS)
def test_the_demo_still_gives_their_numbers(tmp_path: Path, method: str) -> None:
    """Other processors round otherwise, so some of the 359 test samples may differ."""
    assert NUMBERS["early_seconds"] == pictures.EARLY_SECONDS
    config = resolve({"method": {"name": method}, "run": {"seed": NUMBERS["seeds"][0], "until": 600.0}})
    result = Federation.from_config(config).run(out=tmp_path / "run", observers=[UntilEarly()])
    found = pictures.early_accuracy(result.rows)
    assert found == pytest.approx(NUMBERS["methods"][method]["early_accuracy"], abs=0.03)
