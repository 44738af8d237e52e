"""The page in a real browser (headless Chromium, driven by selenium). Skipped if one of them is missing."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freshet import Federation
from freshet.report.live import WatchServer
from freshet.report.page import report
from freshet.report.reading import read

from .conftest import Write, write_run
from .helpers import EVIL, line, lines, results, serving, world

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install selenium)")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are missing (Debian: chromium, chromium-driver)"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1300,1000",
)  # fmt: skip
SHOT = '<img src="http://127.0.0.1:9/x" onerror="alert(2)">'
Driver = Any


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One browser with an empty profile; its console and its network are on record."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_script_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Driver, tmp_path: Path) -> Callable[..., Driver]:
    """``opened(run, ...)``: the report of these runs, loaded and drawn."""

    def open_(*runs: Path, width: int = 1300, dark: bool = False) -> Driver:
        path = report(runs, tmp_path / "report.html")
        look(browser, width, dark)
        browser.get("about:blank")
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get(path.as_uri())
        wait(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'yes'"))
        return browser

    return open_


def look(browser: Driver, width: int, dark: bool) -> None:
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def wait(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "the page did not get there in time"
        time.sleep(0.05)
    return found


def press(browser: Driver, button: Any) -> None:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
    button.click()


def errors(browser: Driver) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(browser: Driver) -> list[str]:
    """Addresses that the page asked for, apart from itself and what it holds."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in asked if not re.match(r"data:|blob:|about:|file:.*/report\.html$", url)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two methods, two seeds each, with lost uploads, on eight devices."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedasmu", "fedavg"):
        for seed in (1, 2):
            federation = Federation(
                method=method,
                fleet={"devices": 8, "fastest": 4.0, "ratio": 5.0, "up_mbps": 0.5, "down_mbps": 0.5, "loss": 0.1},
                training={"epochs": 4},
                data={"name": "digits", "train_samples": 240, "test_samples": 120},
                run={"per_round": 3, "period": 4.0, "in_flight": 6, "executor": "serial", "target": 0.2},
                seed=seed,
            )
            federation.run(100, out=folder / f"{method}-{seed}")
    return sorted(folder.iterdir())


def test_the_page_draws_everything_without_a_request(opened: Callable[..., Driver], runs: list[Path]) -> None:
    page = opened(*runs)
    drawn = page.execute_script(
        "return [...document.querySelectorAll('#chart-accuracy .scatterlayer .js-line')]"
        ".filter((line) => line.getTotalLength() > 200).length"
    )
    assert drawn >= 2, "one median curve per method"
    assert page.execute_script("return document.querySelectorAll('#chart-accuracy .fills path').length") >= 2, "bands"
    assert len(page.find_elements("css selector", ".headline tbody tr")) == 2
    charts = ("loss", "target", "staleness", "timeline", "alpha", "slots", "choosers", "partition")
    for chart in (*(f"chart-{name}" for name in charts), "control-lambda", "control-upsilon"):
        box = page.find_element("css selector", f"#{chart} .main-svg").size
        assert box["width"] > 250, chart
    assert errors(page) == []
    assert requests(page) == []


def test_the_timeline_has_a_lane_for_every_device(opened: Callable[..., Driver], runs: list[Path]) -> None:
    page = opened(*runs)
    chart = page.find_element("id", "chart-timeline")
    assert chart.get_attribute("data-lanes") == "8"
    labels = [
        text.text for text in chart.find_elements("css selector", ".yaxislayer-above text, .yaxislayer-below text")
    ]
    assert sorted(labels) == [str(device) for device in range(8)]
    painted = page.execute_script(
        "const c = document.getElementById('lanes'), p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const rows = []; for (let lane = 0; lane < 8; lane++) { const y = Math.round((lane + 0.6) / 8.2 * c.height);"
        "const seen = new Set(); for (let x = 0; x < c.width; x++) { const at = 4 * (y * c.width + x);"
        "seen.add(p[at] + ',' + p[at + 1] + ',' + p[at + 2]); } rows.push(seen.size); } return rows"
    )
    assert all(colours >= 3 for colours in painted), f"every lane shows bars, but has these colours: {painted}"


def test_hover_shows_a_devices_numbers(opened: Callable[..., Driver], runs: list[Path]) -> None:
    page = opened(*runs)
    chart, tip = page.find_element("id", "chart-timeline"), page.find_element("id", "tip")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    logged = {(e["device"], e["trip"]): e for e in read(runs[0]).events if e["kind"] == "aggregate"}
    checked = 0
    for x in range(-400, 500, 60):
        ActionChains(page, duration=0).move_to_element_with_offset(chart, x, -30).perform()
        if not tip.is_displayed():
            continue
        text = tip.text
        named = re.match(r"Device (\d+), trip (\d+) \(trains [\d.]+ s\)", text)
        assert named is not None, text
        event = logged.get((int(named[1]), int(named[2])))
        if event is not None:
            facts = dict(zip(*[iter(text.splitlines()[1:])] * 2, strict=True))
            assert facts["staleness"] == str(event["contributions"][0]["staleness"])
            assert float(facts["weight α"]) == pytest.approx(event["alpha"], rel=1e-3)
            checked += 1
    assert checked >= 2


def test_pushes_and_several_merges_are_in_the_legend_and_in_the_box(
    opened: Callable[..., Driver], written: Write
) -> None:
    who = {"device": 0, "trip": 1}
    part = {"device": 0, "base": 1, "staleness": 3, "weight": 1.0}
    events = [
        {"time": 0.0, "kind": "trigger", "version": 1, "epochs": 5, **who},
        {"time": 2.5, "kind": "push", "base": 1, "fresh": 2, **who},
        {"time": 5.0, "kind": "merge", "fresh": 2, "slot": 3, "beta": 0.25, **who},
        {"time": 10.0, "kind": "push", "base": 1, "fresh": 3, **who},
        {"time": 12.5, "kind": "upload", "bytes": 1_000_000, **who},
        {"time": 12.5, "kind": "aggregate", "contributions": [part], "alpha": 1.0, **who},
    ]
    page = opened(written("a", events=events, fleet={"devices": 1}))
    legend = page.find_element("id", "timeline-keys").text
    assert "push" in legend and "merge" in legend and "asks" not in legend
    assert page.find_element("id", "slots-title").text == "When pushed models are merged"
    assert not page.find_element("id", "choosers-part").is_displayed()
    chart, tip = page.find_element("id", "chart-timeline"), page.find_element("id", "tip")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    ActionChains(page, duration=0).move_to_element_with_offset(chart, -200, -20).perform()
    told = wait(lambda: tip.text).splitlines()[1:]
    assert told[2:10] == [
        "pushed", "2.50 s, version 2", "merged", "5.00 s, before epoch 3, β 0.25",
        "pushed", "10.00 s, version 3", "merged", "no",
    ]  # fmt: skip
    assert errors(page) == []


def test_hover_on_a_curve_and_the_zoom_buttons(opened: Callable[..., Driver], runs: list[Path]) -> None:
    page = opened(*runs)
    chart = page.find_element("css selector", "#chart-accuracy .nsewdrag")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    ActionChains(page).move_to_element_with_offset(chart, 5, 0).move_to_element(chart).perform()
    text = wait(lambda: page.find_element("css selector", "#chart-accuracy .hoverlayer").text)
    assert "fedasmu" in text and "fedavg" in text and "%" in text
    ticks = "return document.querySelector('#chart-timeline .xaxislayer-above').textContent"
    before = page.execute_script(ticks)
    press(page, page.find_element("css selector", "[data-move=in]"))
    assert wait(lambda: page.execute_script(ticks) != before)
    press(page, page.find_element("css selector", "[data-move=all]"))
    assert wait(lambda: page.execute_script(ticks) == before)
    assert errors(page) == []


def test_other_axes_hidden_methods_and_other_runs(opened: Callable[..., Driver], runs: list[Path]) -> None:
    page = opened(*runs)
    _, rounds, traffic, wall = page.find_elements("css selector", "#axis button")
    assert all(button.is_enabled() for button in (rounds, traffic, wall))
    press(page, traffic)
    assert wait(lambda: "MB" in page.find_element("css selector", "#chart-accuracy .xtitle").text)
    press(page, page.find_elements("css selector", "#legend .chip")[1])
    assert page.find_elements("css selector", "#legend .chip")[1].get_attribute("aria-pressed") == "false"
    page.execute_script(
        "const s = document.getElementById('run'); s.value = 'fedavg-1'; s.dispatchEvent(new Event('change'))"
    )
    assert not page.find_element("id", "slots-part").is_displayed(), "FedAvg's devices do not ask"
    assert errors(page) == []


def test_ties_are_shown_as_ties(opened: Callable[..., Driver], written: Write) -> None:
    values = {"fedasmu": [0.1, 0.90004, 0.9], "fedavg": [0.1, 0.9, 0.90004], "fedbuff": [0.1, 0.2, 0.3]}
    page = opened(*(written(method, method=method, accuracy=accuracy) for method, accuracy in values.items()))
    highest, first = page.find_elements("css selector", ".card")[:2]
    assert highest.text.splitlines()[:2] == ["Highest final accuracy", "90.0%"]
    for card in (highest, first):
        assert "a tie" in card.text and "fedasmu" in card.text and "fedavg" in card.text
        assert "fedbuff" not in card.text
    tops = page.find_elements("css selector", ".headline tbody tr td:nth-child(2).top-value")
    assert len(tops) == 2, "what reads the same is marked the same"
    assert errors(page) == []


def test_each_data_set_has_its_table_and_selectable_curves(opened: Callable[..., Driver], written: Write) -> None:
    one = written("a", data={"name": "digits"})
    two = written("b", data={"name": "cifar10"}, method="fedavg", accuracy=[0.1, 0.2, 0.3], run={"target": 0.25})
    page = opened(one, two)
    assert [h.text for h in page.find_elements("css selector", ".world > h2")] == ["digits", "cifar10"]
    tables = page.find_elements("css selector", ".world .headline tbody")
    assert [[row.text.split()[0] for row in t.find_elements("css selector", "tr")] for t in tables] == [
        ["fedasmu"],
        ["fedavg"],
    ]
    assert "80 %" in page.find_element("id", "target-note").text
    page.execute_script(
        "const s = document.getElementById('world'); s.value = '1'; s.dispatchEvent(new Event('change'))"
    )
    assert "25 %" in page.find_element("id", "target-note").text
    assert errors(page) == []


def test_the_devices_of_a_run_are_drawn(opened: Callable[..., Driver], written: Write) -> None:
    def sounded(time: float, accuracy: list[float]) -> dict[str, Any]:
        return {"time": time, "kind": "devices", "version": 1, "accuracy": accuracy, "personal_accuracy": [0.8, 1.0]}

    facts = {"devices_median": 0.6, "devices_worst": 0.0, "devices_jain": 0.7}
    events = [sounded(0.0, [0.1, 0.2]), sounded(10.0, [0.0, 0.9])]
    page = opened(written("a", events=events, summary=facts), written("b", method="fedavg", accuracy=[0.1, 0.2]))
    assert page.find_element("id", "devices").is_displayed() and page.find_element("id", "devices-link").is_displayed()
    points = "return document.querySelectorAll('#chart-speed .points path').length"
    assert page.execute_script(points) == 4, "two devices, plain and personalised"
    assert len(page.find_elements("css selector", "#chart-devices .fills path")) >= 2
    table = page.find_elements("css selector", ".headline")[1]
    assert "0.700" in table.text and "60.0" in table.text
    page.execute_script("const s = document.getElementById('run'); s.value = 'b'; s.dispatchEvent(new Event('change'))")
    assert not page.find_element("id", "devices").is_displayed(), "this run did not test its devices"
    assert errors(page) == []


def test_foreign_text_is_text(opened: Callable[..., Driver], written: Write) -> None:
    part = {"device": 1, "base": 1, "staleness": 1, "weight": 1.0}
    events = [
        {"time": 0.0, "kind": "trigger", "device": 0, "trip": 1, "version": 1, "epochs": 5},
        {"time": 12.5, "kind": "upload", "device": 0, "trip": 1, "bytes": 1_000_000},
        {"time": 12.5, "kind": "discard", "device": 0, "trip": 1, "reason": SHOT, "staleness": 9},
        {"time": 12.5, "kind": "aggregate", "contributions": [part], "alpha": 1.0},
    ]
    one = written(SHOT.replace("/", "_"), method=EVIL, events=events, run={EVIL: SHOT}, data={"name": SHOT})
    two = written("b", method=EVIL, fleet={"loss": 0.5}, status=EVIL, model={"name": EVIL})
    page = opened(one, two)
    assert EVIL in page.find_element("id", "worlds").text
    assert EVIL in page.find_element("id", "settings").text
    assert EVIL in page.find_element("id", "uncounted").text
    assert SHOT in page.find_element("id", "title").text
    chart, tip = page.find_element("id", "chart-timeline"), page.find_element("id", "tip")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    ActionChains(page, duration=0).move_to_element_with_offset(chart, 0, -60).perform()
    assert wait(lambda: SHOT in tip.text)
    curve = page.find_element("css selector", "#chart-accuracy .nsewdrag")
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", curve)
    ActionChains(page).move_to_element_with_offset(curve, 5, 0).move_to_element(curve).perform()
    assert wait(lambda: "<script>" in page.find_element("css selector", "#chart-accuracy .hoverlayer").text)
    assert page.execute_script("return document.querySelectorAll('img').length") == 0
    assert page.find_elements("xpath", "//script[contains(., 'alert(1)') and not(@type)]") == []
    assert errors(page) == []
    assert requests(page) == []


def test_the_policy_blocks_injected_scripts(opened: Callable[..., Driver], written: Write) -> None:
    page = opened(written("a"))
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.intruder = 1'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'http://127.0.0.1:9/x'; document.body.append(i);"
    )
    blocked: list[str] = []
    wait(lambda: blocked.extend(errors(page)) or len(blocked) >= 2)
    assert page.execute_script("return window.intruder") is None
    assert len(blocked) == 2 and all("Content Security Policy" in message for message in blocked)


def test_dark_by_system_and_by_button(opened: Callable[..., Driver], runs: list[Path]) -> None:
    def brightness(page: Driver) -> int:
        colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    page = opened(*runs, dark=True)
    assert brightness(page) < 150
    tick = "return getComputedStyle(document.querySelector('#chart-accuracy .xtick text')).fill"
    dark = page.execute_script(tick)
    button = page.find_element("id", "theme")
    button.click()
    assert brightness(page) > 600
    assert wait(lambda: page.execute_script(tick) != dark)
    button.click()
    assert brightness(page) < 150
    button.click()  # as the system says again
    look(page, 1300, dark=False)
    assert wait(lambda: brightness(page) > 600)
    assert errors(page) == []


def test_on_a_phone_nothing_is_wider_than_the_screen(opened: Callable[..., Driver], runs: list[Path]) -> None:
    page = opened(*runs, width=390)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390
    wide = page.execute_script(
        "return [...document.querySelectorAll('.chart .main-svg')]"
        ".filter((svg) => svg.getBoundingClientRect().right > 391).length"
    )
    assert wide == 0
    hint = "return getComputedStyle(document.querySelector('#worlds .more')).display"
    assert page.execute_script(hint) == "flex", "the table goes on to the right"
    page.execute_script("const box = document.querySelector('.headline'); box.scrollLeft = box.scrollWidth")
    wait(lambda: page.execute_script(hint) == "none")
    assert errors(page) == []


def test_two_thousand_uploads_of_a_hundred_devices(opened: Callable[..., Driver], tmp_path: Path) -> None:
    """Smooth means: a handful of elements and a repaint that fits into a frame or two, also without a graphics card."""
    events: list[dict[str, Any]] = []
    for trip in range(2_000):
        who = {"device": trip % 100, "trip": trip // 100 + 1}
        start, end = 20.0 * (trip // 100), 20.0 * (trip // 100) + 12.5
        alpha, staleness = 1 / (1 + trip % 50), 1 + trip % 50
        part = {"device": trip % 100, "base": 1, "staleness": staleness, "weight": alpha}
        events += [
            {"time": start, "kind": "trigger", "version": 1, "epochs": 5, **who},
            {"time": end, "kind": "upload", "bytes": 1_000_000, **who},
            {"time": end, "kind": "aggregate", "contributions": [part], "alpha": alpha, **who},
        ]
    events.sort(key=lambda event: event["time"])
    page = opened(write_run(tmp_path / "big", events=events, fleet={"devices": 100}))
    assert page.find_element("id", "chart-timeline").get_attribute("data-lanes") == "100"
    assert page.execute_script("return document.querySelectorAll('#chart-timeline *').length") < 1_000
    zooms = page.execute_async_script(
        "const done = arguments[0]; (async () => { const times = [];"
        "for (const how of ['in', 'in', 'right', 'out', 'all', 'in', 'in', 'right', 'out', 'all', 'in', 'out'])"
        "{ const start = performance.now();"
        "await Timeline.move(how); times.push(performance.now() - start); }"
        "done(times); })()"
    )
    assert min(zooms) < 1_000, f"{zooms} ms; about 60 ms on an idle machine, and the least of them shows its own cost"
    assert errors(page) == []


def test_watching_a_run_as_it_grows(browser: Driver, written: Write) -> None:
    place = written("a", accuracy=[0.1], status=None)
    look(browser, 1300, dark=False)
    browser.get("about:blank")
    browser.get_log("browser")
    with serving(WatchServer(place)) as server:
        browser.get(server.url)
        cards = lambda: browser.find_element("id", "worlds").text  # noqa: E731
        wait(lambda: "10.0" in cards())
        assert "live" in browser.find_element("id", "live").text
        with (place / "metrics.jsonl").open("a") as file:
            file.write(lines([{"time": 10.0, "accuracy": 0.777, "bytes_up": 1, "bytes_down": 1}]))
        wait(lambda: "77.7" in cards())
        (place / "summary.json").write_text(json.dumps({"status": "finished"}))
        wait(lambda: "finished" in browser.find_element("id", "live").text)
        assert errors(browser) == []
    browser.get("about:blank")


def test_results_and_tunings_without_runs_make_a_page(browser: Driver, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(results("curves", [world("cnn", [line("fedasmu")])])))
    trials = [{"value": 0.5, "state": "complete", "values": {"training.lr": 0.1}, "error": None}]
    study = {"method": EVIL, "validation": 0.2, "seeds": [1], "space": {"training.lr": {}}, "trials": trials}
    (tmp_path / "b.json").write_text(json.dumps(study))
    path = report([], tmp_path / "report.html", None, sorted(tmp_path.glob("*.json")))
    look(browser, 1300, False)
    browser.get_log("browser")
    browser.get(path.as_uri())
    wait(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'yes'"))
    text = browser.find_element("id", "experiments").text
    assert "an experiment" in text and f"tuning of {EVIL}" in text and "50.0" in text
    assert not browser.find_element("id", "accuracy").is_displayed()
    assert errors(browser) == []


def test_experiments_are_drawn_with_their_tables(browser: Driver, runs: list[Path], tmp_path: Path) -> None:
    lines = [line("fedasmu"), line(EVIL, time=None, diverged=[{"seed": 0, "time": 240.0}])]
    found = [results("methods", [world("lenet", lines)]), results("curves", [world("cnn", lines)])]
    for place, each in enumerate(found):
        (tmp_path / f"{place}.json").write_text(json.dumps(each))
    path = report(runs[:1], tmp_path / "report.html", None, sorted(tmp_path.glob("*.json")))
    look(browser, 1300, False)
    browser.get_log("browser")
    browser.get(path.as_uri())
    wait(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'yes'"))
    section = browser.find_element("id", "experiments")
    wait(lambda: len(section.find_elements("css selector", ".main-svg")) >= 3)
    assert "an experiment" in section.text and "1 diverged at 240 s" in section.text and EVIL in section.text
    assert "of which fresh models" in section.text and "not reached" in section.text
    assert errors(browser) == []


@pytest.mark.parametrize("target", [None, 15.0])
def test_another_metric_has_no_per_cent_and_no_default_target(
    browser: Driver,
    written: Write,
    tmp_path: Path,
    target: float | None,
) -> None:
    setting = {} if target is None else {"run": {"target": target}}
    runs = [
        written(f"{method}{seed}", method=method, seed=seed, metric="rmse", accuracy=[1425.0, 14.253 + seed], **setting)
        for method in ("fedasync", "fedavg")
        for seed in (0, 1)
    ]
    held = {"reference": "fedasync", "difference": 2.5, "p": 0.5, "pairs": 2, "time_raw": None}
    lines = [line("fedasync", accuracy=14.25, time=None), line("fedavg", accuracy=1425.0, time=None, against=held)]
    found = results("curves", [world("mine", lines) | {"target": target, "metric": "rmse", "direction": "min"}])
    trials = [{"value": -14.25, "state": "complete", "values": {"training.lr": 0.1}, "error": None}]
    study = {"method": "fedavg", "validation": 0.2, "seeds": [1], "space": {"training.lr": {}}, "trials": trials}
    (tmp_path / "a.json").write_text(json.dumps(found))
    (tmp_path / "b.json").write_text(json.dumps(study | {"metric": "rmse", "direction": "min"}))
    path = report(runs, tmp_path / "report.html", None, sorted(tmp_path.glob("*.json")))
    look(browser, 1300, False)
    browser.get_log("browser")
    browser.get(path.as_uri())
    wait(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'yes'"))
    wait(lambda: len(browser.find_elements("css selector", "#experiments .main-svg")) >= 1)
    assert errors(browser) == []
    heads, tables = [], []
    for table in browser.find_elements("css selector", "#experiments table"):
        heads.append([cell.text for cell in table.find_elements("css selector", "th")])
        tables.append([cell.text for cell in table.find_elements("css selector", "tbody tr:last-child td")])
    times = [] if target is None else ["to 15 (s)", "time vs reference"]
    held_by = "rmse vs reference" if target is None else "rmse vs it"
    assert heads[0] == ["method", "runs", "rmse", *times, held_by, "p"]
    assert tables[0][2] == "1425" and "2.5" in tables[0][-2]
    assert heads[-1][1] == "score" and tables[-1][1] == "-14.25"
    text = browser.find_element("css selector", "body").text
    assert ("Time to 15" in text or "First to 15" in text) == (target is not None)
    assert "Time to 0" not in text and "accuracy (%)" not in text
