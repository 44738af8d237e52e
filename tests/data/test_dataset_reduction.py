"""A run on a reduced data set says so: on the screen, in config.toml and in summary.json."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freshet import Federation, Observer
from freshet.config import resolve
from freshet.data import from_arrays, load
from freshet.runs.reader import RunDirectory


class Heard(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_message(self, message: str) -> None:
        self.said.append(message)


def test_a_full_data_set_prints_no_notice(tmp_path, federate):
    assert load("digits").reduction_notice() is None
    x, y = np.ones((6, 2), np.float32), np.arange(6) % 2
    assert from_arrays("mine", (x, y), (x, y)).reduction_notice() is None
    heard = Heard()
    federate(data={"train_samples": 0, "test_samples": 0}).run(1, out=tmp_path / "run", observers=[heard])
    assert not any("is reduced" in said for said in heard.said)
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())["data"]
    assert facts == {
        "name": "digits", "train": 1438, "test": 359, "whole_train": 1438, "whole_test": 359, "held_out": False,
        "part": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.subset(700), "digits is reduced: trains on 700 of 1,438 samples and tests on all test samples"),
        (lambda d: d.subset(None, 50), "digits is reduced: trains on all samples and tests on 50 of 359"),
        (lambda d: d.subset(700, 50), "digits is reduced: trains on 700 of 1,438 samples and tests on 50 of 359"),
        (
            lambda d: d.with_validation(0.5, 0),
            "digits is reduced: trains on 719 of 1,438 samples and tests on 719 samples held out of the training set",
        ),
    ],
)
def test_the_notice_names_used_and_full_counts(change, says):
    assert change(load("digits")).reduction_notice() == says


def test_the_notice_is_printed_and_written_to_config_and_summary(tmp_path, federate):
    heard = Heard()
    result = federate().run(1, out=tmp_path / "run", observers=[heard])
    sentence = "digits is reduced: trains on 240 of 1,438 samples and tests on 120 of 359"
    assert heard.said.count(sentence) == 1
    assert result.summary["data"]["part"] == sentence
    assert (tmp_path / "run" / "config.toml").read_text().startswith(f"# {sentence}\n")
    assert resolve(RunDirectory(tmp_path / "run").config()).data.train_samples == 240


def test_a_name_cannot_break_the_config(tmp_path):
    x, y = np.ones((20, 2), np.float32), np.arange(20) % 2
    data = replace(from_arrays("mine", (x, y), (x, y)), name="mine\n[run]\nseed = 7")
    options = {"run": {"per_round": 1, "executor": "serial"}, "data": {"train_samples": 10}}
    Federation("mlp", data, devices=2, **options).run(1, out=tmp_path / "run")
    assert RunDirectory(tmp_path / "run").config()["run"]["seed"] == 0


def test_the_compact_tiny_imagenet_has_a_notice(real_data: Path):
    data = load("tiny-imagenet", real_data)
    if len(data.y_train) == 100_000:
        assert data.reduction_notice() is None
    else:
        assert data.reduction_notice() == (
            "tiny-imagenet is reduced: trains on 20,000 of 100,000 samples and tests on 4,000 of 10,000"
        )
