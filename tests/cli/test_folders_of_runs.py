"""``freshet show`` and ``freshet audit`` of runs in a folder, audits of foreign methods, tables on narrow screens."""

import json
import shutil
from pathlib import Path

import pytest

from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

METHODS = ("fedasmu", "fedavg")
SMALL = ("model.name=mlp", "fleet.devices=6", "data.train_samples=150", "run.executor=serial")


@pytest.fixture
def compared(finished, tmp_path) -> Path:
    """A folder as `freshet compare` writes it."""
    folder = tmp_path / "compare"
    for method in METHODS:
        shutil.copytree(finished(method).directory, folder / "runs" / method)
    (folder / "comparison.json").write_text("{}")
    return folder


def renamed(run: Path, method: str) -> Path:
    """The run with another method in its configuration."""
    config = run / "config.toml"
    config.write_text(config.read_text().replace('name = "fedavg"', f'name = "{method}"', 1))
    return run


def test_audit_takes_a_folder_of_runs_and_says_one_line_of_each(command, compared):
    done = command("audit", compared)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split(": ok (")[0] for line in lines] == [str(compared / "runs" / method) for method in METHODS]


def test_one_run_in_the_folder_that_does_not_add_up_fails_the_audit(command, compared):
    log = compared / "runs" / "fedasmu" / "events.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    renamed(compared / "runs" / "fedavg", "mine:Own")
    done = command("audit", compared)
    assert done.code == 1, "what was not audited does not hide what failed"
    assert "fedasmu: events.jsonl, line 1 " in done.out and "fedavg: not audited" in done.out


def test_show_takes_a_folder_of_runs_and_names_each(command, compared):
    done = command("show", compared)
    assert (done.code, done.err) == (0, "")
    assert [line for line in done.out.splitlines() if line.startswith(str(compared))] == [
        str(compared / "runs" / method) for method in METHODS
    ]
    assert done.out.count("virtual time") == 2
    assert str(compared) not in command("show", compared / "runs" / "fedavg").out, "a single run needs no heading"


@pytest.mark.parametrize("verb", ["show", "audit"])
def test_a_folder_whose_runs_are_gone_is_one_sentence(command, compared, verb):
    shutil.rmtree(compared / "runs")
    done = command(verb, compared)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"there is no run to {verb}" in done.err


def test_another_method_than_the_runs_is_said_to_be_another(command, compared):
    run = renamed(compared / "runs" / "fedavg", "mine:Own")
    done = command("audit", run, "--method", "fedasmu")
    assert done.code == 3
    assert "not audited: its method is mine:Own, not the given --method fedasmu; give --method mine:Own" in done.out
    assert "name it with" not in done.out


def test_a_class_that_was_given_from_python_is_to_be_named_with_its_module(compared):
    run = renamed(compared / "runs" / "fedavg", "custom:Own")
    assert audit(RunDirectory(run), "fedasmu").unaudited.endswith("give --method MODULE:Own")


def test_a_method_that_no_module_can_bring_is_not_asked_for(compared):
    run = renamed(compared / "runs" / "fedavg", "fedfuture")
    assert audit(RunDirectory(run), "fedfuture").unaudited.startswith("this version of Freshet has no method fedfuture")


def test_a_run_that_was_not_audited_has_an_exit_code_of_its_own(command, compared):
    renamed(compared / "runs" / "fedavg", "mine:Own")
    done = command("audit", compared)
    assert done.code == 3, "neither passed (0) nor failed (1)"
    assert done.out.count(": ok (") == 1 and done.out.count(": not audited: ") == 1


# ---- tables on narrow screens


@pytest.mark.parametrize("columns", [200, 60, 30])
def test_no_digit_of_a_summary_is_cut_however_narrow_the_screen(command, compared, monkeypatch, columns):
    place = compared / "runs" / "fedasmu" / "summary.json"
    summary = json.loads(place.read_text()) | {"final_accuracy": 0.12345, "bytes_up": 123_456_000, "uploads": 1234567}
    place.write_text(json.dumps(summary))
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = command("show", compared / "runs" / "fedasmu").out.split("status")[0]
    assert "…" not in shown
    for figure in ("fedasmu", "accuracy", "discarded", "0.123", "123.5 MB", "1234567"):
        assert figure in shown


def test_in_a_pipe_the_table_keeps_one_line_per_run(command, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    name = "tests.methods.contract_methods:Half"  # with its figures too long for 80 columns
    small = [word for setting in SMALL for word in ("-s", setting)]
    done = command("run", "-m", name, "--until", 5, "-o", "x", *small)
    assert done.code == 0, done.err
    head, row, place = done.out.splitlines()
    assert head.split()[:2] == ["method", "accuracy"] and row.startswith(name) and "…" not in row
    assert place == "x"
