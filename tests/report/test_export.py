"""CSV, Parquet, PDF and LaTeX."""

import csv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from freshet import Result
from freshet.cli import report as commands
from freshet.errors import ConfigError
from freshet.report import export
from freshet.report.export import latex, tex, to_csv, to_latex, to_parquet, to_pdf
from freshet.report.groups import group_runs
from freshet.report.reading import read_all

from .conftest import Write


def test_csv_gives_the_same_bits_back(finished: Callable[[str], Result], tmp_path: Path) -> None:
    result = finished("fedasmu")
    to_csv(read_all([result.directory]), tmp_path / "m.csv")
    with (tmp_path / "m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy"]) for row in rows] == result.accuracy.tolist()
    assert [float(row["loss"]) for row in rows] == result.loss.tolist()
    assert {row["method"] for row in rows} == {"fedasmu"}
    assert list(rows[0])[:9] == ["run", "method", "label", "seed", "status", "time", "version", "accuracy", "loss"]


def test_parquet_or_one_clear_sentence(written: Write, tmp_path: Path) -> None:
    runs = read_all([written("a")])
    if find_spec("pyarrow") is None:
        with pytest.raises(ConfigError, match="needs pyarrow"):
            to_parquet(runs, tmp_path / "m.parquet")
        return
    import pandas as pd

    to_parquet(runs, tmp_path / "m.parquet")
    assert pd.read_parquet(tmp_path / "m.parquet")["accuracy"].tolist() == [0.1, 0.5, 0.9]


def test_without_pyarrow_nothing_is_written(written: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--parquet: needs pyarrow"):
        commands.export([written("a")], csv=tmp_path / "m.csv", parquet=tmp_path / "m.parquet")
    assert not (tmp_path / "m.csv").exists()


def test_pdf_has_its_pages(written: Write, finished: Callable[[str], Result], tmp_path: Path) -> None:
    seeds = [written(f"a{seed}", seed=seed, method="$x^2$") for seed in (1, 2)]
    to_pdf(read_all([*seeds, finished("fedasmu").directory]), tmp_path / "f.pdf")
    content = (tmp_path / "f.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert content.count(b"/Type /Page ") == 6, "curves twice on each data set; times of one, staleness of the other"


def test_latex_by_hand(written: Write) -> None:
    ours = [written(f"a{seed}", seed=seed, accuracy=[0.1, 0.5 + seed / 10]) for seed in (1, 2, 3)]
    table = latex(group_runs(read_all([*ours, written("b", method="a_b & <c>", accuracy=[0.1, 0.2])])), 0.65)
    lines = table.splitlines()
    assert r"fedasmu & 3 & \textbf{70.0 {\scriptsize (60.0--80.0)}} &" in lines[6]
    assert r"\textbf{10 {\scriptsize (2 of 3)}} & -- &" in lines[6]
    assert lines[7].startswith(r"a\_b \& \textless{}c\textgreater{} & 1 & 20.0 & 20.0 & -- & -- &")
    assert tex("\\{}$%#~^\n") == r"\textbackslash{}\{\}\$\%\#\textasciitilde{}\textasciicircum{} "


@pytest.mark.parametrize(
    ("target", "times"), [(15.0, " & First crossing of 15 (s) & 5-point mean (s)"), (None, ""), (-0.5, " & First")]
)
def test_latex_of_a_metric_other_than_accuracy(written: Write, target: float | None, times: str) -> None:
    runs = [written(f"r{seed}", seed=seed, metric="rmse", accuracy=[2e4, 14.25 + 1e4 * seed]) for seed in (0, 1)]
    lines = latex(group_runs(read_all(runs)), target).splitlines()
    heads, cells = (next(line for line in lines if line.startswith(word)) for word in ("Method &", "fedasmu &"))
    assert heads.startswith(f"Method & Seeds & Final rmse & Best rmse{times}")
    assert ("First" in heads, r"\%" in heads) == (target is not None, False)
    assert cells.startswith(r"fedasmu & 2 & 5014 {\scriptsize (14.25--10010)} &")
    assert cells.count("&") == heads.count("&")


def test_the_target_is_checked_against_the_metric(written: Write, tmp_path: Path) -> None:
    to_latex(read_all([written("r", metric="rmse", accuracy=[20.0, 14.0])]), tmp_path / "t.tex", 15.0)
    assert "crossing of 15 (s)" in (tmp_path / "t.tex").read_text()
    for write in (to_latex, to_pdf):
        with pytest.raises(ConfigError, match=r"--target: is an accuracy and must be in 0..1, but 15 was given"):
            write(read_all([written(write.__name__)]), tmp_path / "no", 15.0)
    assert not (tmp_path / "no").exists()


def test_all_requested_files_are_written_or_none(
    written: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, files = [written("a")], {"csv": tmp_path / "m.csv", "pdf": tmp_path / "f.pdf"}
    for bad in (tmp_path / "no" / "t.tex", tmp_path):
        with pytest.raises(ConfigError, match=r"--latex: .* cannot be written"):
            commands.export(place, **files, latex=bad)
    monkeypatch.setattr(export, "to_latex", lambda runs, path, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        commands.export(place, **files, latex=tmp_path / "t.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_targets_of_own_metrics_on_the_command_line(written: Write, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command("report")(commands.report)
    app.command("export")(commands.export)
    place = str(written("r", metric="rmse", accuracy=[20.0, 14.0]))
    for line in (
        ["report", place, "-o", str(tmp_path / "r.html")],
        ["export", place, "--pdf", str(tmp_path / "f.pdf")],
    ):
        done = CliRunner().invoke(app, [*line, "--target", "15"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    with pytest.raises(ConfigError, match="--target: must be a finite number, but nan was given"):
        CliRunner().invoke(app, ["report", place, "--target", "nan"], catch_exceptions=False)


def test_the_commands(written: Write, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command("report")(commands.report)
    app.command("export")(commands.export)
    place, runner = str(written("a")), CliRunner()
    done = runner.invoke(app, ["report", place, "-o", str(tmp_path / "r.html")], catch_exceptions=False)
    assert (done.exit_code, (tmp_path / "r.html").is_file()) == (0, True)
    done = runner.invoke(app, ["export", place, "--csv", str(tmp_path / "m.csv"), "--latex", str(tmp_path / "t.tex")])
    assert (done.exit_code, (tmp_path / "m.csv").is_file(), (tmp_path / "t.tex").is_file()) == (0, True, True)
    with pytest.raises(ConfigError, match="at least one"):
        runner.invoke(app, ["export", place], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--csv"):
        runner.invoke(app, ["export", place, "--csv", str(tmp_path / "no" / "m.csv")], catch_exceptions=False)
