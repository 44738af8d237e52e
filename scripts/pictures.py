"""Make the pictures of the report in docs/images from runs of `freshet demo`, and write down the numbers in them.

    python scripts/pictures.py [--runs DIR]

The demo runs with three seeds, into DIR; runs that are there already are kept. ``report.json`` beside the pictures
holds the numbers, and tests/test_pictures.py compares them with the demo. Needs selenium, chromium and chromedriver.
"""

import argparse
import base64
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from freshet import __version__
from freshet.report.page import document, report
from freshet.report.reading import find, read_all

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
NUMBERS = IMAGES / "report.json"
SEEDS = (0, 1, 2)
#: The first seed's mean accuracy over the tests of these seconds is written down, too: they are soon run again.
EARLY_SECONDS = 150.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
WIDE, PHONE = 1400, 390
#: Pixels between two screens of a phone in one picture.
GAP = 24
#: The timeline shows these seconds of a run whose links are thin, so that downloads and uploads can be seen.
THIN = ("--until", "210s", "--seed", "1", "-s", "fleet.up_mbps=0.1", "-s", "fleet.down_mbps=0.2")
SHOWN_SECONDS = (150, 200)
#: Where the mouse points, as shares of the window.
POINTER = (0.48, 0.421)


def run_demo(folder: Path) -> None:
    """Run the demo with every seed that has no folder yet."""
    for seed in SEEDS:
        place = folder / f"seed-{seed}"
        if not place.is_dir():
            subprocess.run([sys.executable, "-m", "freshet", "demo", "--seed", str(seed), "-o", str(place)], check=True)


def run_thin(folder: Path) -> None:
    """Make the run of the timeline."""
    words = ("run", "--method", "fedasmu-fresh", *THIN, "--out", str(folder))
    subprocess.run([sys.executable, "-m", "freshet", *words], check=True)


def numbers(folder: Path) -> dict[str, Any]:
    """What the table of the report shows, by method: medians, and the accuracy of the first seconds."""
    runs = read_all(find(folder).runs)
    [world] = document(runs)["worlds"]
    early = {run.method: early_accuracy(run.metrics) for run in runs if run.seed == SEEDS[0]}
    return {
        "freshet": __version__,
        "seeds": list(SEEDS),
        "early_seconds": EARLY_SECONDS,
        "methods": {
            line["label"]: {
                "accuracy": line["accuracy"]["median"],
                "best": line["best"]["median"],
                "time_to_target": line["time_raw"]["median"],
                "uploads": line["uploads"]["median"],
                "early_accuracy": early[line["label"]],
            }
            for line in world["lines"]
        },
    }


def early_accuracy(rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean accuracy of the tests in the first seconds of a run."""
    return fmean(row["accuracy"] for row in rows if row["time"] <= EARLY_SECONDS)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless browser with an empty profile."""
    from selenium import webdriver

    with TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield driver
        finally:
            driver.quit()


def open_page(driver: Any, page: Path, width: int, height: int, *, dark: bool = False) -> None:
    """Open the report in a window of this size and wait until it is drawn."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.get(page.as_uri())
    end = time.monotonic() + 120.0
    while not driver.execute_script("return document.documentElement.dataset.ready === 'yes'"):
        if time.monotonic() > end:
            raise SystemExit("the page was not drawn in two minutes")
        time.sleep(0.1)
    time.sleep(1.5)  # charts fade in


def shot(driver: Any, section: str = "") -> Image.Image:
    """What the window shows, from the start of the page or of a section."""
    place = f"document.getElementById('{section}').getBoundingClientRect().top + scrollY - 64" if section else "0"
    driver.execute_script(f"window.scrollTo({{top: {place}, behavior: 'instant'}})")
    time.sleep(0.5)
    found = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    return Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB")


def beside(screens: list[Image.Image]) -> Image.Image:
    """Screens of a phone, side by side."""
    width = sum(each.width for each in screens) + GAP * (len(screens) - 1)
    whole = Image.new("RGB", (width, screens[0].height), "white")
    for place, each in enumerate(screens):
        whole.paste(each, (place * (each.width + GAP), 0))
    return whole


def timeline(driver: Any, page: Path) -> Image.Image:
    """Some seconds of the fleet, with the mouse on a trip."""
    open_page(driver, page, WIDE, 1010)
    seconds = json.dumps({"xaxis.range": list(SHOWN_SECONDS)})
    driver.execute_script(f"Plotly.relayout(document.querySelector('#fleet .js-plotly-plot'), {seconds})")
    shot(driver, "fleet")  # scrolls there
    place = {"x": round(POINTER[0] * WIDE), "y": round(POINTER[1] * 1010)}
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **place})
    return shot(driver, "fleet")


def draw(page: Path, thin: Path) -> None:
    """Write the four pictures: those of the demo, and the timeline of the run with thin links."""
    with browser() as driver:
        open_page(driver, page, WIDE, 1390)
        shot(driver).save(IMAGES / "report.png", optimize=True)
        timeline(driver, thin).save(IMAGES / "report-timeline.png", optimize=True)
        open_page(driver, page, WIDE, 1200, dark=True)
        shot(driver).save(IMAGES / "report-dark.png", optimize=True)
        open_page(driver, page, PHONE, 1055)
        screens = [shot(driver, section) for section in ("", "accuracy", "fleet")]
        beside(screens).save(IMAGES / "report-phone.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the demo's runs (default: a temporary one)")
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        own = Path(temporary)
        folder = given.runs or own / "runs"
        run_demo(folder)
        run_thin(own / "thin")
        draw(report(folder, own / "report.html"), report(own / "thin", own / "thin.html"))
        NUMBERS.write_text(json.dumps(numbers(folder), indent=2) + "\n")


if __name__ == "__main__":
    main()
