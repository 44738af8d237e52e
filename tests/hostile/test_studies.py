"""Comparisons and studies from strangers: nothing outside is written, no code that they name is imported."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from freshet.errors import RunError
from freshet.experiments import results
from freshet.experiments.store import Store

from ..cli.conftest import command  # noqa: F401
from ..conftest import small
from .test_run_directories import SAVED, TRAP, StopAt, hard_link, pipe, symlink
from .test_run_directories import Stop as Stopped

KINDS = pytest.mark.parametrize("how", [symlink, hard_link, pipe])


@KINDS
@pytest.mark.timeout(300)
def test_a_lock_outside_its_folder_is_refused(tmp_path: Path, how: Any) -> None:
    folder, victim = tmp_path / "study", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    how(folder / ".lock", victim)
    with pytest.raises(RunError, match=r"cannot be written \(it "), Store(folder).lock():
        pass
    assert victim.read_text() == "precious"


@pytest.fixture
def tuner(tmp_path: Path) -> Any:
    tune = pytest.importorskip("freshet.experiments.tune")
    optuna, folder = tune.load_optuna(), tmp_path / "study"
    folder.mkdir()
    return lambda: tune.Tuner("fedprox", {"method": {"name": "fedprox"}}, folder, tune.Budget(1, 1))._open(optuna)


@KINDS
@pytest.mark.timeout(300)
def test_a_journal_outside_its_folder_is_refused(tmp_path: Path, tuner: Any, how: Any) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    how(tmp_path / "study" / "study.journal", victim)
    with pytest.raises(RunError, match=r"study\.journal cannot be used \(it "):
        tuner()
    assert victim.read_text() == ""


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_study_resumes_after_a_kill_in_the_middle_of_a_line(tmp_path: Path, tuner: Any, cut: int) -> None:
    study = tuner()
    study.tell(study.ask(), 0.5)
    journal = tmp_path / "study" / "study.journal"
    journal.write_bytes(journal.read_bytes()[:-cut])  # the last line, that the trial is done, was never finished
    study = tuner()
    study.tell(study.ask(), 0.25)
    states = [trial.state.name for trial in tuner().trials]
    assert states[:2] == ["FAIL", "COMPLETE"], "the trial that was cut off is made up for"


# ---- compare --tuned


def tuned(folder: Path, name: Any, record: Any, **training: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "best.toml").write_text(tomli_w.dumps({"method": {"name": name}, "training": training}))
    (folder / "tuning.json").write_text(record if isinstance(record, str) else json.dumps(record))
    return folder


BUDGET = {"trials": 1, "seeds": 1, "until": 1.0}
COMPARE = ("compare", "-m", "fedavg", "--seeds", "1", "--list", "--tuned")


def test_foreign_code_that_a_study_names_is_not_imported(
    command: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "evilstudy.py").write_text(TRAP.format(trace=str(tmp_path / "trace")))
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tuned(tmp_path / "t", "evilstudy:Mine", {"method": "evilstudy:Mine", "budget": BUDGET}, lr=0.1)
    done = command(*COMPARE, folder, "-o", tmp_path / "out")
    assert done.code == 2 and "and is not imported from there" in done.err and len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "trace").exists() and "evilstudy" not in sys.modules


NONSENSE: list[tuple[Any, Any, dict[str, Any]]] = [
    ("fedavg", {"method": "fedavg", "budget": BUDGET}, {}),
    ("fedavg", {"method": "fedavg", "budget": BUDGET}, {"lr": "x"}),
    (3, {"method": "fedavg", "budget": BUDGET}, {"lr": 0.1}),
    ("fedavg", "[" * 100_000, {"lr": 0.1}),
    ("fedavg", "\x00", {"lr": 0.1}),
    ("fedavg", [], {"lr": 0.1}),
    ("fedavg", {"method": [], "budget": BUDGET}, {"lr": 0.1}),
    ("fedavg", {"method": "fedavg", "budget": 3}, {"lr": 0.1}),
    ("fedavg", {"method": "fedavg", "budget": {"trials": 1}}, {"lr": 0.1}),
    ("fedavg", {"method": "fedavg", "budget": BUDGET | {"until": "x"}}, {"lr": 0.1}),
]


@pytest.mark.parametrize("given", NONSENSE, ids=range(len(NONSENSE)))
def test_a_study_of_nonsense_is_one_sentence(command: Any, tmp_path: Path, given: Any) -> None:  # noqa: F811
    name, record, training = given
    done = command(*COMPARE, tuned(tmp_path / "t", name, record, **training), "-o", tmp_path / "out")
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1, done


def test_no_cell_of_a_results_table_is_a_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "rows", lambda results: [{"world": "=1+1", "method": "@x\x1b[31m", "lr": -1.5}])
    _, table = results.write({}, tmp_path)
    assert table.read_text() == "world,method,lr\n'=1+1,'@x\\x1b[31m,-1.5\n"


# ---- what a kill at the last moment leaves behind


@pytest.mark.parametrize("keep", [False, True])
def test_leftovers_of_a_finished_run_that_was_killed_are_removed(tmp_path: Path, keep: bool) -> None:
    place, run = tmp_path / "run", SAVED | {"keep_checkpoint": keep}
    with pytest.raises(Stopped):
        small("fedavg", run=run).run(60, out=place, observers=[StopAt(35.0)])
    shutil.copytree(place / "checkpoint", tmp_path / "left")
    small("fedavg", run=run).resume(place)
    if not (place / "checkpoint").exists():
        (tmp_path / "left").rename(place / "checkpoint")
    with pytest.raises(RunError, match="already finished"):
        small("fedavg", run=run).resume(place)
    assert (place / "checkpoint").exists() == keep
