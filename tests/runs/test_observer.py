"""Who watches a run: what is no observer is refused before the run begins."""

from typing import Any
from unittest.mock import Mock

import pytest

from freshet import ConfigError, Observer
from freshet.runs.writer import check_observers


class Halfway:
    def on_event(self, event: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([print], "observers: <built-in function print> has no on_event; derive its class from freshet.Observer"),
        ([Observer(), Halfway()], "has no on_metrics; derive its class from freshet.Observer"),
        ([Observer], "observers: Observer is a class; give an object, Observer()"),
        (Observer(), "observers: must be a list, as in observers=[Mine()], but <"),
        (print, "observers: must be a list"),
    ],
)
def test_what_is_no_observer_is_refused_before_anything_is_written(given, sentence, federate, tmp_path):
    with pytest.raises(ConfigError) as told:
        federate("fedavg").run(10, out=tmp_path / "run", observers=given)
    assert sentence in str(told.value) and "\n" not in str(told.value)


def test_not_even_a_folder_with_a_name_of_its_own_is_left_behind(federate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="observers"):
        federate("fedavg").run(10, observers=[print])
    assert not list(tmp_path.glob("runs/*"))
    assert not (tmp_path / "run").exists()
    federate("fedavg").run(10, out=tmp_path / "run")


def test_a_run_that_is_resumed_refuses_it_and_stays_as_it_was(federate, tmp_path):
    federate("fedavg", run={"keep_checkpoint": True}).run(10, out=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match="has no on_event"):
        federate("fedavg", run={"keep_checkpoint": True}).resume(tmp_path / "run", until=20, observers=[print])
    after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert after == before


def test_whatever_looks_like_an_observer_is_one():
    class Mine(Observer):
        pass

    both = (Mine(), Mock())
    assert check_observers(both) == list(both) == check_observers(iter(both))  # type: ignore[arg-type]
