"""Progress bars and printed forms: short in a terminal, a table in a notebook, and nothing cut from a DataFrame."""

import io
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from torch import nn

from freshet import Federation, Observer, compare, load
from freshet.display import (
    MAX_ROWS,
    LiveProgress,
    NotebookBar,
    facts_html,
    in_notebook,
    progress_bar,
    table_html,
    whole_table,
)

RUN = {"per_round": 2, "period": 4.0, "in_flight": 2, "executor": "serial", "eval_every": 1.0}


def toy(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((40, 6)).astype(np.float32), np.arange(40) % 3


def build(method: str = "fedavg", seed: int = 0) -> Federation:
    given = {"devices": 4, "run": RUN, "fleet": {"fastest": 2.0}}
    return Federation(lambda: nn.Linear(6, 3), toy(), toy(1), method=method, seed=seed, **given)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory):
    return build().run(80, out=tmp_path_factory.mktemp("runs") / "a")


def test_a_federation_prints_in_one_line():
    assert repr(build()) == "Federation(fedavg on custom: 4 devices, custom of 21 parameters)"
    shown = build()._repr_html_()
    assert "<table>" in shown and "40 training and 40 test samples" in shown


def test_a_result_prints_in_one_line(result):
    value = result.summary["final_accuracy"]
    assert repr(result) == f"Result(fedavg: accuracy {value:.3f} after 80 s, finished, in {result.directory})"
    assert repr(load(result.directory)) == repr(result)
    assert f"{value:.3f}" in result._repr_html_()


def test_a_comparison_prints_in_one_line(tmp_path):
    found = compare(lambda method, seed: build(method, seed).with_settings({"run.until": 8.0}), ["fedavg", "fedasync"],
                    seeds=1, out=tmp_path / "c")  # fmt: skip
    assert repr(found) == f"Comparison(2 methods, best {found.best}, in {tmp_path / 'c'})"
    shown = found._repr_html_()
    assert all(f"<td>{method}</td>" in shown for method in ("fedavg", "fedasync")) and "1/1" in shown


def test_a_frame_prints_every_number(result):
    frame = result.frame()
    assert len(frame) > 60, "pandas leaves rows out from 61 on"
    assert list(frame.columns[:3]) == ["time", "accuracy", "loss"]
    assert "..." not in repr(frame)
    assert len(repr(frame).splitlines()) == 1 + len(frame)
    assert all(name in repr(frame).splitlines()[0] for name in frame.columns)
    assert "..." not in frame._repr_html_() and frame._repr_html_().count("<tr") == 1 + len(frame)


def test_a_frame_is_a_data_frame(result):
    frame = result.frame()
    assert type(frame[frame.time > 10]) is pd.DataFrame
    pd.testing.assert_frame_equal(pd.DataFrame(pickle.loads(pickle.dumps(frame))), pd.DataFrame(frame))
    assert len(repr(whole_table({"a": range(MAX_ROWS + 1)})).splitlines()) < 100, "a long table is shortened"


def test_texts_are_escaped_in_a_notebook():
    assert "<script>" not in facts_html("<script>", {"<script>": "<script>"})
    assert "<script>" not in table_html("<script>", ["<script>"], [["<script>"]])


# ---- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_a_pipe_none(monkeypatch):
    with progress_bar("fedavg", 10.0, 0, wanted=True) as observers:
        assert observers == [], "the tests' stderr is no terminal"
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("fedavg", 10.0, 0, wanted=True) as (bar,):
        assert isinstance(bar, Observer)
        bar.on_progress(5.0)
    assert "fedavg" in sys.stderr.getvalue()
    with progress_bar("fedavg", 10.0, 0, wanted=False) as observers:
        assert observers == []


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_draws_its_bar_unless_told_not_to(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    built = build().with_settings({"run.keep_checkpoint": True})
    built.run(8, out=tmp_path / "a", progress=wanted)
    assert ("fedavg" in sys.stderr.getvalue()) is wanted
    monkeypatch.setattr(sys, "stderr", Terminal())
    built.resume(tmp_path / "a", until=12, progress=wanted)
    assert ("fedavg" in sys.stderr.getvalue()) is wanted


class Display:
    """IPython.display as far as a bar uses it."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def HTML(self, text: str) -> str:  # noqa: N802
        return text

    def display(self, page: str, display_id: bool) -> "Display":
        assert display_id
        return self

    def update(self, page: str) -> None:
        self.pages.append(page)


def test_a_notebook_shows_a_bar(monkeypatch):
    shell = type("ZMQInteractiveShell", (), {})()
    shown = Display()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    assert in_notebook()
    with progress_bar("<fedavg>", 10.0, 0, wanted=True) as (bar,):
        assert isinstance(bar, LiveProgress) and isinstance(bar.bar, NotebookBar)
        bar.on_progress(5.0)
        bar.on_message("a message")
    assert 'value="0.5000"' in shown.pages[-1]
    assert "&lt;fedavg&gt;" in shown.pages[-1] and "<fedavg>" not in shown.pages[-1]


def test_a_script_is_no_notebook():
    assert not in_notebook()
    assert not Console(file=io.StringIO()).is_terminal
