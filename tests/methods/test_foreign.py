"""A new method is one file: ``foreign.py`` is run, audited, plotted, tuned and compared without any other change."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from freshet import Federation
from freshet.cli.app import app
from freshet.config import load_tables, resolve
from freshet.core.about import Range
from freshet.errors import ConfigError
from freshet.experiments.tune import LR, space_for
from freshet.methods import class_and_preset, registry
from freshet.report.closeup import closeup
from freshet.report.reading import read
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

from .foreign import Trust

TRUST = f"{Trust.__module__}:Trust"
TINY = ("model.name=mlp", "fleet.devices=4", "fleet.fastest=4.0", "data.train_samples=200", "data.test_samples=60")
TINY += ("training.epochs=2", "run.eval_every=4.0", "run.per_round=2", "run.period=4.0", "run.executor=serial")


def freshet(*words: str) -> str:
    outcome = CliRunner().invoke(app, list(words), env={"COLUMNS": "240"})
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def settings(*more: str) -> list[str]:
    return [word for setting in (*TINY, *more) for word in ("-s", setting)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the foreign method from the command line."""
    folder = tmp_path_factory.mktemp("foreign") / "run"
    freshet("run", "-m", TRUST, "--until", "40", "-q", *settings("method.rate=0.3"), "-o", str(folder))
    return folder


def test_foreign_method_runs_with_its_options_and_kind(made: Path) -> None:
    run = RunDirectory(made)
    assert run.summary()["status"] == "finished"
    assert run.config()["method"] == {"name": TRUST, "p0": 0.4, "rate": 0.3, "a": 0.5, "warm_up": 2}
    assert run.config()["run"]["trigger"] == "periodic"
    assert sum(event["kind"] == "discard" for event in run.events()) == 2


def test_options_are_listed_and_checked_against_the_run() -> None:
    assert "growth rate of the trust" in freshet("methods", TRUST)
    assert "trust" not in registry()
    with pytest.raises(ConfigError, match=r"^method.warm_up: must be at most 10 fleet.devices = 40$"):
        resolve({"method": {"name": TRUST, "warm_up": 41}, "fleet": {"devices": 4}})


def test_foreign_method_is_audited_and_a_forged_number_is_found(made: Path, tmp_path: Path) -> None:
    assert audit(RunDirectory(made), TRUST).problem is None
    log = [json.loads(line) for line in (made / "events.jsonl").read_text().splitlines()]
    number, event = [(i, e) for i, e in enumerate(log, 1) if e["kind"] == "aggregate"][1]
    event["p"] += 0.01
    (tmp_path / "config.toml").write_text((made / "config.toml").read_text())
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in log))
    assert str(audit(RunDirectory(tmp_path), TRUST).problem).startswith(f"events.jsonl, line {number} (aggregate): p ")


def test_curve_is_drawn_as_logged(made: Path) -> None:
    (figure,) = closeup(read(made))["controls"]
    assert (figure["name"], figure["symbol"], figure["meaning"]) == ("trust", "π", "server, trust <in> a device")
    logged = [(e["device"], e["p"]) for e in RunDirectory(made).events() if e["kind"] == "aggregate"]
    drawn = {trace["name"]: trace["y"] for trace in figure["data"] if trace.get("name", "").startswith("device")}
    assert drawn
    for name, values in drawn.items():
        assert values == pytest.approx([p for device, p in logged if f"device {device}" == name], abs=1e-6)


def test_page_shows_a_foreign_method_without_importing_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> Any:
        raise AssertionError(f"a report imports {path}")

    monkeypatch.setattr("freshet.methods.loading.load_object", refuse)
    freshet("report", str(made), "-o", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "trust \\u003cin\\u003e a device" in page or "trust &lt;in&gt; a device" in page
    assert "trust <in> a device" not in page


def test_tuning_space_is_the_methods_and_the_learning_rate() -> None:
    assert space_for(TRUST, 3) == {
        "training.lr": LR,
        "method.p0": Range(0.1, 1.0, log=True),
        "method.a": Range(0.0, 1.5),
        "method.warm_up": Range(0, 3, whole=True),
    }


def test_foreign_method_is_tuned_and_the_result_runs(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'freshet[tune]'")
    folder, again = tmp_path / "tuned", tmp_path / "again"
    budget = ("--trials", "3", "--seeds", "1", "--until", "24")
    freshet("tune", "-m", TRUST, *budget, *settings(), "-o", str(folder))
    record = json.loads((folder / "tuning.json").read_text())
    assert record["counts"]["fail"] == 0 and len(record["trials"]) == 3
    assert record["trials"][0]["values"] == {"training.lr": 0.1, "method.p0": 0.4, "method.a": 0.5, "method.warm_up": 2}
    assert len({trial["values"]["method.p0"] for trial in record["trials"]}) == 3
    best = load_tables(folder / "best.toml")["method"]
    assert {key: best[key] for key in ("p0", "a", "warm_up")} == {
        key.removeprefix("method."): value for key, value in record["values"].items() if key != "training.lr"
    }
    freshet("run", "--config", str(folder / "best.toml"), "-q", "-o", str(again))
    assert audit(RunDirectory(again), TRUST).problem is None


def test_foreign_method_is_compared_with_a_built_in_one(tmp_path: Path) -> None:
    freshet("compare", "-m", f"fedasync,{TRUST}", "--seeds", "1", "--until", "24", *settings(), "-o", str(tmp_path))
    (world,) = json.loads((tmp_path / "comparison.json").read_text())["worlds"]
    assert [(line["method"], line["kind"]) for line in world["lines"]] == [("fedasync", "async"), (TRUST, "async")]


def test_a_class_without_a_header_gets_one_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        class_and_preset(f"{Trust.__module__}:Nameless")
    assert str(caught.value) == (
        f"method.name: '{Trust.__module__}:Nameless' has no header; "
        'add about = About(name, "async" or "sync", title, citation) to the class'
    )


def test_a_subclass_may_be_run_under_the_header_that_it_inherits() -> None:
    method, preset = class_and_preset(f"{Trust.__module__}:Rounded")
    assert (method.about, preset) == (Trust.about, {})


def test_a_range_of_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.mu: .*:Astray' has it in about\.space, but not among its options"):
        class_and_preset(f"{Trust.__module__}:Astray")


def test_options_of_another_kind_get_one_sentence() -> None:
    class Plain(BaseModel):
        trust: float = 0.5

    class Other(Trust):
        Options = Plain  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"Other has Options of another kind; derive them from freshet\.Options"):
        Federation(method=Other)
