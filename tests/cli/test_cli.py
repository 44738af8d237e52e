"""The ``freshet`` command as a user meets it: the real entry point, its exit codes, its one sentence for a mistake."""

import io
import json
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

import freshet
from freshet.cli.screen import LiveProgress, name_with_marks, number, size
from freshet.paper.cells import CELLS
from tests.methods import contract_methods

FAST = ["-s", "model.name=mlp", "-s", "fleet.devices=6", "-s", "data.train_samples=150", "-s", "run.executor=serial"]
COMMANDS = ["run", "demo", "methods", "models", "show", "audit", "data"]


def process(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", "from freshet.cli import main; main()", *(str(a) for a in arguments)]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


# ---- help


def test_version(command):
    done = command("--version")
    assert (done.code, done.out.strip()) == (0, f"freshet {freshet.__version__}")


def test_help_lists_every_command(command):
    done = command("--help")
    assert done.code == 0
    assert all(name in done.out for name in COMMANDS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "run",
            [
                "--method",
                "--config",
                "--until",
                "--rounds",
                "--seed",
                "--out",
                "--set",
                "section.key=value",
                "10m",
                "Example",
            ],
        ),
        ("demo", ["--out", "--until", "--seed"]),
        ("methods", ["NAME", "options"]),
        ("models", ["networks"]),
        ("show", ["RUN"]),
        ("audit", ["RUN", "line"]),
        ("data", ["list"]),
    ],
)
def test_help_of_a_command_is_worth_reading(command, name, words):
    done = command(name, "--help")
    assert done.code == 0
    assert [word for word in words if word not in done.out and word.lower() not in done.out.lower()] == []


def test_methods_are_listed_with_variants_and_options(command):
    listed = command("methods")
    assert listed.code == 0
    assert all(name in listed.out for name in ("fedasmu", "fedasmu-da", "fedssmu", "fedavg", "synchronous"))
    one = command("methods", "fedasmu-da")
    assert all(key in one.out for key in ("lambda0", "tau_max", "equations", "dynamic_server"))


def test_what_must_be_said_of_a_method_stands_beside_its_name(command):
    listed = command("methods").out
    assert "asofed [-F]" in listed and "fedsa [R]" in listed
    assert "[-F] ASO-Fed without its feature step, the paper's ablation ASO-Fed(-F)" in listed
    assert "[R] reconstructed" in listed
    assert "ASO-Fed(-F)" in command("methods", "asofed").out
    assert "[R] reconstructed" in command("methods", "fedsa").out
    assert "[" not in name_with_marks("fedavg") and name_with_marks("nobody:Knows") == "nobody:Knows"
    assert name_with_marks("fedsa") == "fedsa [R]"


# ---- run


def test_names_and_numbers_of_cells_are_whole_in_a_narrow_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = command("cells").out.splitlines()
    assert [row.split()[0] for row in rows[1:13]] == list(CELLS)
    assert rows[11].split()[-3:] == ["0.268", "in", "243896"]


def test_flags_settings_and_defaults_end_in_the_configuration(command):
    done = command(
        "run", "-m", "fedavg", "--until", "0.1m", "--seed", 3, "-o", "here", "-s", "fleet.ratio=20", "-q", *FAST
    )
    assert (done.code, done.out.strip()) == (0, "here")
    config = tomllib.loads(Path("here/config.toml").read_text())
    assert (config["method"]["name"], config["run"]["until"], config["run"]["seed"]) == ("fedavg", 6.0, 3)
    assert (config["fleet"]["ratio"], config["fleet"]["devices"]) == (20.0, 6)
    assert json.loads(Path("here/summary.json").read_text())["status"] == "finished"


def test_without_out_the_run_goes_under_runs(command):
    done = command("run", "-m", "fedavg", "--until", 5, "-q", *FAST)
    directory = Path(done.out.strip())
    assert done.code == 0
    assert directory.parent == Path("runs")
    assert (directory / "summary.json").is_file()


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu", "fedavg"])
def test_a_runs_own_configuration_runs_again_bit_for_bit(command, method):
    first = command("run", "-m", method, "--until", 45, "-o", "one", "-s", "training.lr=0.1234567891234", "-q", *FAST)
    again = command("run", "--config", "one/config.toml", "-o", "two", "-q")
    assert (first.code, again.code) == (0, 0)
    assert Path("one/events.jsonl").read_bytes() == Path("two/events.jsonl").read_bytes()
    assert Path("one/config.toml").read_bytes() == Path("two/config.toml").read_bytes()
    sums = [json.loads(Path(name, "summary.json").read_text())["weights_sha256"] for name in ("one", "two")]
    assert sums[0] == sums[1]


def test_flags_win_over_the_file_and_settings_over_flags(command):
    Path("c.toml").write_text('[method]\nname = "fedavg"\n[run]\nseed = 1\nuntil = 50.0\nper_round = 2\n')
    done = command("run", "-c", "c.toml", "--seed", 2, "--until", 5, "-s", "run.seed=3", "-o", "x", "-q", *FAST)
    assert done.code == 0
    run = tomllib.loads(Path("x/config.toml").read_text())["run"]
    assert (run["seed"], run["until"], run["per_round"]) == (3, 5.0, 2)


def test_the_table_and_the_directory_are_printed(command):
    done = command("run", "-m", "fedavg", "--until", 5, "-o", "x", *FAST)
    assert done.code == 0
    assert "accuracy" in done.out
    assert done.out.strip().splitlines()[-1] == "x"


@pytest.mark.parametrize(("method", "uploads"), [("fedavg", 12), ("fedasmu", 12)])
def test_a_run_may_end_by_rounds(command, method, uploads):
    done = command("run", "-m", method, "--rounds", 2, "-o", "x", "-q", *FAST)
    assert (done.code, done.out.strip()) == (0, "x")
    run = tomllib.loads(Path("x/config.toml").read_text())["run"]
    assert (run["rounds"], run["until"], run["per_round"]) == (2, 0.0, 6)
    summary = json.loads(Path("x/summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["uploads"]) == ("finished", 2, uploads)
    assert ", 2 rounds, in " in command("show", "x").out


WILD = ["-s", "training.lr=3e4", "-s", "run.eval_every=5", "-s", "run.gate=off"]


def test_a_run_that_diverges_says_so_in_the_table_and_in_a_sentence(command):
    done = command("run", "-m", "fedavg", "--until", 500, "-o", "x", *FAST, *WILD)
    assert done.code == 0
    time = json.loads(Path("x/summary.json").read_text())["diverged"]
    said = f"fedavg diverged at {time:g} s: test loss "
    assert "fedavg diverged" in done.out
    assert done.err.count(said) == 1 and "; try a smaller training.lr" in done.err
    shown = command("show", "x").out
    assert said in shown and "status" in shown and shown.count("diverged") >= 3
    again = command("resume", "x")
    assert (again.code, len(again.err.strip().splitlines())) == (2, 1)
    assert f"x diverged at {time} s and cannot be resumed" in again.err


def test_a_run_that_goes_on_although_it_diverged_says_so_too(command):
    done = command("run", "-m", "fedavg", "--until", 60, "-o", "x", *FAST, *WILD, "-s", "run.diverged=continue")
    assert json.loads(Path("x/summary.json").read_text())["status"] == "finished"
    assert "fedavg diverged" in done.out and "fedavg diverged at" in done.err


@pytest.mark.parametrize("lr", ["30", "1e38"])
def test_a_run_whose_uploads_are_wild_says_so_and_what_to_do(command, lr):
    rate = ["-s", f"training.lr={lr}", "-s", "run.diverged=continue"]
    done = command("run", "-m", "fedasync", "--until", 60, "-o", "x", *FAST, *rate)
    summary = json.loads(Path("x/summary.json").read_text())
    share = "all" if summary["rejected"] == summary["uploads"] else f"{summary['rejected']} of"
    assert 2 * summary["wild"] > summary["rejected"] > 0
    sentence = (
        f"fedasync: {share} {summary['uploads']} uploads were rejected; "
        "most were not finite or far larger than usual; try a smaller training.lr"
    )
    assert sentence in done.err and sentence in command("show", "x").out


@pytest.mark.parametrize(
    ("until", "rounds", "time", "done", "share"),
    [(100.0, 0, 40.0, 7, 0.4), (0.0, 20, 40.0, 5, 0.25), (100.0, 20, 40.0, 5, 0.4), (100.0, 20, 40.0, 12, 0.6)],
)
def test_the_bar_shows_the_end_that_is_nearer(until, rounds, time, done, share):
    progress = LiveProgress(Console(file=io.StringIO(), force_terminal=True))
    progress.begin("fedavg", until, rounds)
    progress.on_progress(time)
    progress.on_metrics({"rounds": done, "accuracy": 0.5, "uploads": 3})
    task = progress.bar.tasks[0]
    assert task.completed / task.total == pytest.approx(share)
    assert task.fields["rounds"] == (f"  round {done}/20" if rounds else "")
    progress.on_end({"status": "finished", "virtual_time": 50.0, "rounds": done})
    assert task.finished


# ---- bad input

BAD = [
    (["-m", "fedasmu", "-s", "fleet.devices=0"], "fleet.devices", "1"),
    (["-m", "fedasmu", "-s", "fleet.devices=ten"], "fleet.devices", "integer"),
    (["-m", "fedasmu", "-s", "fleet.devices=100000"], "fleet.devices", "allowed: 1 to"),
    (["-m", "fedasmu", "-s", "fleet.devices=1000"], "data.min_samples", "allowed"),
    (["-m", "fedasmu", "-s", "fleet.ratio=0.5"], "fleet.ratio", "1"),
    (["-m", "fedasmu", "-s", "fleet.devices=5", "-s", "run.per_round=6"], "run.per_round", "5"),
    (["-m", "fedasmu", "-s", "method.slot=6"], "method.slot", "1..5"),
    (["-m", "fedasmu", "-s", "method.slot=0"], "method.slot", "1..5"),
    (["-m", "fedasmu", "-s", "fleet.ratoi=2"], "fleet.ratoi", "fleet.ratio"),
    (["-m", "fedasmu", "-s", "flet.ratio=2"], "flet", "fleet"),
    (["-m", "fedasmu", "-s", "ratio=2"], "--set", "section.key=value"),
    (["-m", "fedasmu", "-s", "training.lr=fast"], "training.lr", "number"),
    (["-m", "fedasmu", "-s", "data.name=mnist3d"], "data.name", "digits"),
    (["-m", "fedasmu", "-s", "model.name=giant"], "model.name", "digits"),
    (["-m", "fedasmu", "-s", "data.train_samples=99999"], "data.train_samples", "allowed"),
    (["-m", "fedwhat"], "method.name", "fedasmu"),
    (["-m", "fedasmu", "--until", "soon"], "run.until", "10m"),
    (["-m", "fedasmu", "--until", "-5"], "run.until", "positive"),
    (["-m", "fedasmu", "--rounds", "-2"], "run.rounds", "0"),
    (["-m", "fedasmu", "-s", "model.pool=true"], "model.pool", "digits"),
    (["-m", "fedasmu", "--seed", "-1"], "run.seed", "0"),
    (["-c", "missing.toml"], "--config", "does not exist"),
    ([], "--method", "freshet methods"),
]


@pytest.mark.parametrize(("arguments", "key", "allowed"), BAD)
def test_bad_input_is_one_sentence_exit_code_2_and_nothing_written(command, tmp_path, arguments, key, allowed):
    done = command("run", *arguments)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert done.err.startswith("freshet: ")
    assert key in done.err and allowed in done.err
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


FILES = {
    "method is no table": 'method = "fedavg"\n',
    "run is no table": "run = 5\n",
    "fleet is no table": "fleet = [1, 2]\n",
    "no toml": "[run\n",
}


@pytest.mark.parametrize("flags", [[], ["-m", "fedavg"], ["--seed", "1"], ["--until", "5"], ["-s", "run.seed=1"]])
@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_one_sentence_whatever_flags_come_with_it(command, tmp_path, case, flags):
    Path("c.toml").write_text(FILES[case])
    done = command("run", "-c", "c.toml", *flags)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


def test_a_seed_that_is_no_number_is_refused_with_the_flags_name(command, tmp_path):
    done = command("run", "-m", "fedavg", "--seed", "abc")
    assert done.code == 2
    assert "--seed" in done.err and "integer" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["a folder with files", "a file", "below a file"])
def test_an_output_that_is_taken_is_one_sentence_and_is_left_alone(command, tmp_path, taken):
    out = Path("out")
    if taken == "a folder with files":
        out.mkdir()
        (out / "mine").touch()
    else:
        out.write_text("mine")
    done = command(
        "run", "-m", "fedavg", "--until", 5, "-q", "-o", out / "run" if taken == "below a file" else out, *FAST
    )
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "out" in done.err
    assert [p.name for p in tmp_path.rglob("*")] == (["out", "mine"] if out.is_dir() else ["out"])


def test_a_process_of_its_own_ends_in_the_same_way(tmp_path):
    done = process("run", "-m", "fedavg", "-s", "fleet.devices=0", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# ---- show and audit


def test_show_tells_what_a_run_was(command, finished):
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


def test_audit_never_says_ok_of_a_method_without_an_audit(command):
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


def test_kinds_of_events_from_elsewhere_are_skipped_with_a_word(command, finished):
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


@pytest.mark.parametrize("name", contract_methods.SENTENCES)
def test_a_method_that_breaks_the_contract_ends_in_one_sentence(command, name):
    settings = [*FAST, "-s", "run.per_round=3"]
    done = command("run", "-m", f"tests.methods.contract_methods:{name}", "--until", 300, "-q", "-o", "run", *settings)
    assert done.code == 2
    last = done.err.strip().splitlines()[-1]
    assert last.startswith(f"freshet: {contract_methods.SENTENCES[name]}")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("name", ["show", "audit"])
def test_a_folder_that_is_no_run_is_one_sentence(command, name):
    done = command(name, "nowhere")
    assert done.code == 2
    assert done.err.startswith("freshet: nowhere is not a run directory")


@pytest.mark.parametrize("content", ["{}", '{"target": "high", "method": 3}', "[]", "{"])
def test_show_of_a_broken_summary_is_one_sentence(command, finished, content):
    Path("run").mkdir()
    Path("run/config.toml").write_bytes((finished("fedavg").directory / "config.toml").read_bytes())
    Path("run/summary.json").write_text(content)
    done = command("show", "run")
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert "summary.json" in done.err


def test_values_with_brackets_are_shown_as_they_are(command, finished):
    Path("run").mkdir()
    config = (finished("fedavg").directory / "config.toml").read_text()
    Path("run/config.toml").write_text(config.replace('dir = ""', 'dir = "[/b]data"'))
    Path("run/summary.json").write_bytes((finished("fedavg").directory / "summary.json").read_bytes())
    done = command("show", "run")
    assert done.code == 0
    assert "[/b]data" in done.out


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")]
)
def test_bytes_for_people(value, text):
    assert size(value) == text


def test_a_figure_that_is_missing_is_a_dash():
    assert (number(None), number(0.12345), number(2, 1)) == ("–", "0.123", "2.0")


# ---- Ctrl-C


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_ctrl_c_leaves_a_run_directory_that_can_be_read_and_adds_up(tmp_path, command, executor):
    arguments = ["run", "-m", "fedasmu", "--until", "1000h", "-o", "run", "-q", *FAST, "-s", f"run.executor={executor}"]
    line = [sys.executable, "-c", "from freshet.cli import main; main()", *arguments]
    log = tmp_path / "run" / "events.jsonl"
    with subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        try:
            deadline = time.monotonic() + 240
            while not (log.is_file() and log.stat().st_size > 0) and time.monotonic() < deadline:
                assert running.poll() is None
                time.sleep(0.05)
            assert log.stat().st_size > 0
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=240)
        finally:
            running.kill()
    assert running.returncode == 130
    assert "Traceback" not in err and "interrupted" in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["virtual_time"] < 3_600_000
    assert command("audit", "run").code == 0
    assert command("show", "run").code == 0
