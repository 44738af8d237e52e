"""``freshet methods``, ``cells``, ``show`` and ``audit``, also of folders and unfinished runs."""

import json
import shutil
from pathlib import Path

import pytest

from freshet.cli.screen import name_with_marks
from freshet.paper.cells import CELLS
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

FAST = ["-s", "model.name=mlp", "-s", "fleet.devices=6", "-s", "data.train_samples=150", "-s", "run.executor=serial"]


def test_methods_are_listed_with_variants_and_options(command):
    listed = command("methods")
    assert listed.code == 0
    assert all(name in listed.out for name in ("fedasmu", "fedasmu-da", "fedssmu", "fedavg", "synchronous"))
    one = command("methods", "fedasmu-da")
    assert all(key in one.out for key in ("lambda0", "tau_max", "equations", "dynamic_server"))


def test_marks_stand_beside_the_name_of_a_method(command):
    listed = command("methods").out
    assert "asofed [-F]" in listed and "fedsa [R]" in listed
    assert "[-F] ASO-Fed without its feature step, the paper's ablation ASO-Fed(-F)" in listed
    assert "[R] reconstructed" in listed
    assert "ASO-Fed(-F)" in command("methods", "asofed").out
    assert "[R] reconstructed" in command("methods", "fedsa").out
    assert "[" not in name_with_marks("fedavg") and name_with_marks("nobody:Knows") == "nobody:Knows"
    assert name_with_marks("fedsa") == "fedsa [R]"


def test_names_and_numbers_of_cells_are_not_cut_in_a_narrow_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = command("cells").out.splitlines()
    assert [row.split()[0] for row in rows[1:13]] == list(CELLS)
    assert rows[11].split()[-3:] == ["0.268", "in", "243896"]


def test_show_describes_a_run(command, finished):
    done = command("show", finished("fedasmu").directory)
    assert done.code == 0
    summary = finished("fedasmu").summary
    for fact in ("fedasmu", "finished", summary["weights_sha256"][:16], f"{summary['uploads']} uploads", "lambda0"):
        assert fact in done.out


def test_audit_says_ok_or_names_the_line(command, finished, tmp_path):
    source = finished("fedasmu").directory
    good = command("audit", source, finished("fedavg").directory)
    assert good.code == 0
    assert good.out.count(": ok (") == 2
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.toml").write_bytes((source / "config.toml").read_bytes())
    lines = (source / "events.jsonl").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "aggregate")
    event = json.loads(lines[place])
    lines[place] = json.dumps(event | {"alpha": event["alpha"] * 1.01})
    (copy / "events.jsonl").write_text("\n".join(lines) + "\n")
    bad = command("audit", copy)
    assert bad.code == 1
    assert f"line {place + 1}" in bad.out and "alpha" in bad.out


def test_audit_never_says_ok_for_a_method_without_an_audit(command):
    ran = command("run", "-m", "tests.methods.contract_methods:Half", "--until", 60, "-q", "-o", "run", *FAST)
    assert ran.code == 0, ran.err
    done = command("audit", "run", "--method", "tests.methods.contract_methods:Half")
    assert done.code == 3
    assert done.out.startswith("run: not audited: its method has no audit(); only the order of events was checked (")
    assert "ok" not in done.out and "aggregations" in done.out
    lines = Path("run/events.jsonl").read_text().splitlines()
    Path("run/events.jsonl").write_text("\n".join(lines[:10] + lines[11:]) + "\n")
    broken = command("audit", "run")
    assert broken.code == 1 and "line 11" in broken.out, "what needs no formulas is checked all the same"


def test_unknown_event_kinds_are_skipped_with_a_notice(command, finished):
    shutil.copytree(finished("fedasmu").directory, "run")
    log = Path("run/events.jsonl")
    count = len(log.read_text().splitlines())
    last = json.loads(log.read_text().splitlines()[-1])["time"]
    with log.open("a") as file:
        for number in (1, 2):
            file.write(json.dumps({"seq": count + number, "time": last, "kind": "weather", "sky": ["grey"]}) + "\n")
    done = command("audit", "run")
    assert done.code == 0
    assert ": ok (" in done.out
    assert done.out.strip().endswith("skipped kinds of events that this version does not know: weather (2)")
    for line in (["show", "run"], ["report", "run", "-o", "page.html"], ["export", "run", "--csv", "table.csv"]):
        done = command(*line)
        assert (done.code, done.err) == (0, ""), line
    assert Path("page.html").stat().st_size > 10_000 and "fedasmu" in Path("table.csv").read_text()


@pytest.mark.parametrize("name", ["show", "audit"])
def test_a_folder_that_is_not_a_run_gives_one_sentence(command, name):
    done = command(name, "nowhere")
    assert done.code == 2
    assert done.err.startswith("freshet: nowhere is not a run directory")


@pytest.mark.parametrize("content", ["{}", '{"target": "high", "method": 3}', "[]", "{"])
def test_show_of_a_broken_summary_gives_one_sentence(command, finished, content):
    Path("run").mkdir()
    Path("run/config.toml").write_bytes((finished("fedavg").directory / "config.toml").read_bytes())
    Path("run/summary.json").write_text(content)
    done = command("show", "run")
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "summary.json" in done.err


def test_values_with_brackets_are_printed_unchanged(command, finished):
    Path("run").mkdir()
    config = (finished("fedavg").directory / "config.toml").read_text()
    Path("run/config.toml").write_text(config.replace('dir = ""', 'dir = "[/b]data"'))
    Path("run/summary.json").write_bytes((finished("fedavg").directory / "summary.json").read_bytes())
    done = command("show", "run")
    assert done.code == 0
    assert "[/b]data" in done.out


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
    """Change the method in a run's configuration."""
    config = run / "config.toml"
    config.write_text(config.read_text().replace('name = "fedavg"', f'name = "{method}"', 1))
    return run


def test_audit_of_a_folder_prints_one_line_per_run(command, compared):
    done = command("audit", compared)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split(": ok (")[0] for line in lines] == [str(compared / "runs" / method) for method in METHODS]


def test_one_wrong_run_in_a_folder_fails_the_audit(command, compared):
    log = compared / "runs" / "fedasmu" / "events.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    renamed(compared / "runs" / "fedavg", "mine:Own")
    done = command("audit", compared)
    assert done.code == 1, "what was not audited does not hide what failed"
    assert "fedasmu: events.jsonl, line 1 " in done.out and "fedavg: not audited" in done.out


def test_show_of_a_folder_names_each_run(command, compared):
    done = command("show", compared)
    assert (done.code, done.err) == (0, "")
    assert [line for line in done.out.splitlines() if line.startswith(str(compared))] == [
        str(compared / "runs" / method) for method in METHODS
    ]
    assert done.out.count("virtual time") == 2
    assert str(compared) not in command("show", compared / "runs" / "fedavg").out, "a single run needs no heading"


@pytest.mark.parametrize("verb", ["show", "audit"])
def test_a_folder_without_its_runs_gives_one_sentence(command, compared, verb):
    shutil.rmtree(compared / "runs")
    done = command(verb, compared)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"there is no run to {verb}" in done.err


def test_a_method_that_differs_from_the_run_is_reported(command, compared):
    run = renamed(compared / "runs" / "fedavg", "mine:Own")
    done = command("audit", run, "--method", "fedasmu")
    assert done.code == 3
    assert "not audited: its method is mine:Own, not the given --method fedasmu; give --method mine:Own" in done.out
    assert "name it with" not in done.out


def test_a_class_given_from_python_must_be_named_with_its_module(compared):
    run = renamed(compared / "runs" / "fedavg", "custom:Own")
    assert audit(RunDirectory(run), "fedasmu").unaudited.endswith("give --method MODULE:Own")


def test_a_method_that_no_module_defines_is_not_requested(compared):
    run = renamed(compared / "runs" / "fedavg", "fedfuture")
    assert audit(RunDirectory(run), "fedfuture").unaudited.startswith("this version of Freshet has no method fedfuture")


def test_a_run_that_was_not_audited_has_its_own_exit_code(command, compared):
    renamed(compared / "runs" / "fedavg", "mine:Own")
    done = command("audit", compared)
    assert done.code == 3, "neither passed (0) nor failed (1)"
    assert done.out.count(": ok (") == 1 and done.out.count(": not audited: ") == 1


@pytest.mark.parametrize("columns", [200, 60, 30])
def test_no_digit_of_a_summary_is_cut_on_any_screen(command, compared, monkeypatch, columns):
    place = compared / "runs" / "fedasmu" / "summary.json"
    summary = json.loads(place.read_text()) | {"final_accuracy": 0.12345, "bytes_up": 123_456_000, "uploads": 1234567}
    place.write_text(json.dumps(summary))
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = command("show", compared / "runs" / "fedasmu").out.split("status")[0]
    assert "…" not in shown
    for figure in ("fedasmu", "accuracy", "discarded", "0.123", "123.5 MB", "1234567"):
        assert figure in shown


def test_on_a_pipe_the_table_has_one_line_per_run(command, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    name = "tests.methods.contract_methods:Half"  # with its numbers too long for 80 columns
    small = [word for setting in SMALL for word in ("-s", setting)]
    done = command("run", "-m", name, "--until", 5, "-o", "x", *small)
    assert done.code == 0, done.err
    head, row, place = done.out.splitlines()
    assert head.split()[:2] == ["method", "accuracy"] and row.startswith(name) and "…" not in row
    assert place == "x"


@pytest.fixture
def killed(finished, tmp_path) -> Path:
    """What `kill -9` leaves: no summary, no model, and a line that was cut off."""
    place = tmp_path / "killed"
    shutil.copytree(finished("fedasmu").directory, place)
    for name in ("summary.json", "model.safetensors"):
        (place / name).unlink()
    log = (place / "events.jsonl").read_bytes()
    (place / "events.jsonl").write_bytes(log[:-20])
    return place


def test_show_of_a_killed_run_shows_what_it_wrote(command, killed, finished):
    done = command("show", killed)
    result = finished("fedasmu")
    assert done.code == 0
    assert "was killed" in done.out and "60 s of 60 s" in done.out
    assert f"accuracy {result.accuracy[-1]:.3f} at 60 s" in done.out
    assert f"{result.summary['uploads']} upload" in done.out and "lambda0" in done.out
    assert f"freshet resume {killed}" in done.out
    shutil.rmtree(killed / "checkpoint")
    assert f"freshet run --config {killed}/config.toml (no checkpoint yet)" in command("show", killed).out


def test_show_of_a_run_killed_at_the_start_shows_its_settings(command, killed):
    for name in ("events.jsonl", "metrics.jsonl"):
        (killed / name).unlink()
    done = command("show", killed)
    assert done.code == 0
    assert done.out.count("none yet") == 2 and "lambda0" in done.out


def test_a_damaged_log_is_reported(command, killed):
    lines = (killed / "events.jsonl").read_text().splitlines()
    (killed / "events.jsonl").write_text("\n".join([*lines[:3], "nonsense", *lines[4:]]) + "\n")
    assert "events.jsonl is damaged at line 4" in command("show", killed).out
