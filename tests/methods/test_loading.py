"""Foreign methods: a class, a file, or a module of the current folder, in this process and in workers."""

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from typer.testing import CliRunner

from freshet import Federation, Observer
from freshet.cli.app import app
from freshet.config import load_tables, resolve
from freshet.core.about import About
from freshet.core.method import Method
from freshet.errors import ConfigError
from freshet.experiments.grid import Entry, Scenario, run_key
from freshet.experiments.tune import space_for
from freshet.methods import builtin_about, class_and_preset, method_name
from freshet.methods._shared.asynchronous import mix_upload
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import default_directory
from tests.methods.foreign import Trust
from tests.methods.helpers import same

ROOT = Path(__file__).parents[2]
TINY: dict[str, dict[str, Any]] = {
    "model": {"name": "mlp"},
    "fleet": {"devices": 4, "fastest": 4.0},
    "data": {"train_samples": 200, "test_samples": 60},
    "training": {"epochs": 2},
    "run": {"eval_every": 8.0, "per_round": 2, "period": 4.0, "executor": "serial"},
}
SETTINGS = [
    word
    for section, table in TINY.items()
    for key, value in table.items()
    for word in ("-s", f"{section}.{key}={json.dumps(value)}")
]
TRUST = f"{Trust.__module__}:Trust"


class Half(Method):
    """Mixes every arrival in with one half."""

    about = About("half", "async", "Half", "nobody, nowhere")

    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return mix_upload(server, upload, trip, 0.5)


def local_class(weight: float) -> type[Method]:
    class Inside(Method):
        about = About("inside", "async", "Inside", "-")

        def receive(self, server: Any, upload: Any, trip: Any) -> Any:
            return mix_upload(server, upload, trip, weight)

    return Inside


def federate(method: Any, **run: Any) -> Federation:
    return Federation(method=method, **(TINY | {"run": TINY["run"] | run}))


def freshet(*words: str, code: int = 0) -> str:
    outcome = CliRunner().invoke(app, list(words), env={"COLUMNS": "240"})
    assert outcome.exit_code == code, outcome.output
    return outcome.output + (str(outcome.exception) if code else "")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write CONTRIBUTING's method to a file, beside a module that it needs."""
    folder = tmp_path_factory.mktemp("own")
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    (folder / "mine_of_mine.py").write_text(code)
    changed = code.replace("alpha=self.mu", "alpha=strength(self.mu)")
    assert changed != code
    header = "from __future__ import annotations\n\nfrom beside_mine import strength\n"
    (folder / "with_friend.py").write_text(header + changed)
    (folder / "beside_mine.py").write_text("def strength(mu):\n    return 2 * mu\n")
    return folder


@pytest.fixture
def here(written: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to the folder of that file. As for a console script, it is not on ``sys.path``."""
    monkeypatch.chdir(written)
    before = [entry for entry in sys.path if Path(entry or ".").resolve() != written]
    monkeypatch.setattr(sys, "path", before.copy())
    yield written
    assert sys.path == before


# ---- the class itself


def test_run_of_an_importable_class_needs_no_further_help(tmp_path: Path) -> None:
    result = federate({"name": Trust, "rate": 0.3}).run(24, out=tmp_path / "run")
    assert RunDirectory(tmp_path / "run").config()["method"] == {
        "name": TRUST,
        "p0": 0.4,
        "rate": 0.3,
        "a": 0.5,
        "warm_up": 2,
    }
    again = Federation(**load_tables(tmp_path / "run" / "config.toml")).run(out=tmp_path / "again")
    same(result.weights, again.weights)
    assert audit(RunDirectory(result.directory)).problem is None


def test_nested_class_has_an_import_path() -> None:
    assert class_and_preset(method_name(Outer.Inner))[0] is Outer.Inner
    assert str(method_name(Outer.Inner)) == f"{__name__}:Outer.Inner"
    assert class_and_preset(f"{__name__}:Outer.Inner")[0] is Outer.Inner


class Outer:
    class Inner(Half):
        pass


class Stopper(Observer):
    def on_progress(self, time: float) -> None:
        if time > 12.0:
            raise KeyboardInterrupt


def test_class_without_import_path_is_resumed_from_python(tmp_path: Path) -> None:
    mine = local_class(0.5)
    whole = federate(mine, checkpoint_every=4.0).run(24, out=tmp_path / "whole")
    federation = federate(mine, checkpoint_every=4.0)
    federation.run(24, out=tmp_path / "run", observers=[Stopper()])
    assert RunDirectory(tmp_path / "run").config()["method"] == {"name": "custom:Inside"}
    output = freshet("resume", str(tmp_path / "run"), code=1)
    assert "'custom:Inside' stands for a class given from Python" in output and "resume(RUN)" in output
    same(federation.resume(tmp_path / "run").weights, whole.weights)
    assert builtin_about("custom:Inside") is None


def test_method_ref_is_a_string_that_carries_its_class() -> None:
    name = method_name(local_class(0.3))
    assert name == "custom:Inside" and json.dumps({"name": name}) == '{"name": "custom:Inside"}'
    sent = pickle.loads(cloudpickle.dumps(name))
    assert sent == name and sent.method.about == class_and_preset(name)[0].about
    entry = Entry("mine", name)
    tables = TINY | {"method": {"name": entry.method}}
    assert resolve(resolve(tables).tables()).method_class is class_and_preset(name)[0]
    assert run_key(resolve(tables)).startswith("custom.Inside-seed0-")
    assert list(space_for(method_name(Trust))) == list(space_for(TRUST))
    assert Scenario().settings("fedavg") == {}


@pytest.mark.parametrize("wrong", [int, Half(None, None), 3, ["fedavg"]])  # type: ignore[arg-type]
def test_neither_name_nor_method_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^method\.name: .*subclass of freshet\.Method"):
        federate({"name": wrong})


# ---- CONTRIBUTING's file


@pytest.mark.parametrize("name", ["mine_of_mine:Mine", "mine_of_mine.py:Mine"])
def test_method_of_contributing_is_run_listed_audited_and_reported(here: Path, name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    freshet("run", "-m", name, "--until", "24", "-q", *SETTINGS, "-s", "method.alpha=0.6", "-o", str(out))
    assert RunDirectory(out).config()["method"] == {"name": name, "alpha": 0.6, "mu": 0.05}
    assert not audit(RunDirectory(out)).audited, "nothing is imported on the word of a run directory"
    found = audit(RunDirectory(out), name)
    assert found.problem is None and found.audited
    assert "weight of a fresh upload" in freshet("methods", name)
    freshet("report", str(out), "-o", str(tmp_path / "page.html"))
    log = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    next(event for event in log if event["kind"] == "aggregate")["times"] += 1
    (out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in log))
    assert "times is logged as 2" in str(audit(RunDirectory(out), name).problem)


@pytest.mark.parametrize("name", ["with_friend:Mine", "with_friend.py:Mine"])
def test_device_rule_reaches_worker_processes(here: Path, name: str, tmp_path: Path) -> None:
    """Workers cannot import the folder, so its modules travel by value with their imports."""
    runs = [federate(name, executor=executor, workers=1) for executor in ("serial", "processes")]
    serial, workers = (run.run(16, out=tmp_path / str(number)).weights for number, run in enumerate(runs))
    same(serial, workers)
    plain = federate({"name": name, "mu": 0.0}).run(16, out=tmp_path / "plain").weights
    assert (plain != serial).any()


def test_method_file_is_compared_and_tuned_from_its_folder(here: Path, tmp_path: Path) -> None:
    both = "fedasync,mine_of_mine.py:Mine"
    freshet("compare", "-m", both, "--seeds", "1", "--until", "16", *SETTINGS, "-o", str(tmp_path / "compared"))
    (world,) = json.loads((tmp_path / "compared" / "comparison.json").read_text())["worlds"]
    assert [line["method"] for line in world["lines"]] == both.split(",")
    assert "method.alpha" in space_for("mine_of_mine:Mine", 3)
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'freshet-fl[tune]'")
    budget = ("--trials", "2", "--seeds", "1", "--until", "16")
    freshet("tune", "-m", "mine_of_mine:Mine", *budget, *SETTINGS, "-o", str(tmp_path / "tuned"))
    assert set(load_tables(tmp_path / "tuned" / "best.toml")["method"]) == {"name", "alpha", "mu"}


def test_default_run_name_contains_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_directory("some/where/mine.py:Mine", 3).name.endswith("-mine.py.Mine-seed3")


# ---- errors are one sentence


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "absent.py:Mine",
            None,
            r"'absent.py:Mine' cannot be imported \(FileNotFoundError: there is no file .*absent.py",
        ),
        ("absent:Mine", None, r"'absent:Mine' cannot be imported \(No module named 'absent'\)"),
        ("broken.py:Mine", "def f(:", r"'broken.py:Mine' cannot be imported \(SyntaxError: "),
        ("empty.py:Mine", "", r"'empty.py:Mine' cannot be imported \(module '.*' has no attribute 'Mine'\)"),
        ("other.py:Mine", "Mine = 3", r"'other.py:Mine' is not a subclass of freshet.Method"),
    ],
)
def test_file_without_the_method_gives_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name.partition(":")[0]).write_text(content)
    before, modules = sys.path.copy(), set(sys.modules)
    with pytest.raises(ConfigError, match=rf"^method\.name: {sentence}"):
        class_and_preset(name)
    assert sys.path == before
    assert content != "def f(:" or set(sys.modules) == modules


def test_file_is_executed_once(tmp_path: Path) -> None:
    path = tmp_path / "once.py"
    path.write_text(
        "from freshet import About, Method\n\n\nclass Mine(Method):\n    about = About('once', 'async', 'Once', '-')\n"
    )
    first = class_and_preset(f"{path}:Mine")[0]
    path.write_text("raise SystemExit")
    assert class_and_preset(f"{path}:Mine")[0] is first


HAS = "import freshet\nclass Mine(freshet.Method): ...\nclass Yours(freshet.Method): ...\nclass Other: ...\n"


@pytest.mark.parametrize(
    ("content", "has"), [(HAS, "it has Mine, Yours"), ("x = 1", "it has no subclass of freshet.Method")]
)
def test_error_names_the_file_and_its_classes(content, has, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        class_and_preset(f"{path}:Nope")
    assert str(caught.value).endswith(f"(module '{path}' has no attribute 'Nope'); {has}")


def test_error_of_the_file_itself_is_reported(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import math\nmath.nope")
    with pytest.raises(ConfigError, match=r"cannot be imported \(module 'math' has no attribute 'nope'\)$"):
        class_and_preset(f"{path}:Nope")
