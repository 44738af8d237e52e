"""Class labels that are not one integer per sample: the error says what they are and how to convert them."""

import numpy as np
import pytest
from torch import nn

from freshet import Federation
from freshet.data.dataset import from_arrays, label_remedy
from freshet.errors import ConfigError, DataError

Y = np.arange(40) % 4
X = np.eye(4, dtype=np.float32)[Y]
ONE_HOT = np.eye(4, dtype=int)[Y]
FORMS = {
    "floats": (Y.astype(float), "whole numbers stored as floats", "y.astype(int)"),
    "column": (Y[:, None], "one column", "y[:, 0]"),
    "column of floats": (Y[:, None].astype(np.float32), "one column of floats", "y[:, 0].astype(int)"),
    "one-hot": (ONE_HOT, "one-hot rows", "y.argmax(1)"),
    "one-hot floats": (ONE_HOT.astype(float), "one-hot rows", "y.argmax(1)"),
}


def build(y: np.ndarray, outputs: int = 4, **given: object) -> Federation:
    return Federation(lambda: nn.Linear(4, outputs), (X, y), (X, y), devices=4, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_the_advised_expression_gives_class_labels(form: str) -> None:
    y, _, give = FORMS[form]
    found = eval(give, {"y": y, "int": int})
    assert np.array_equal(found, Y)
    assert build(found).dataset.classes == 4


@pytest.mark.parametrize("task", ["classification", "binary"])
@pytest.mark.parametrize("form", FORMS)
def test_the_error_names_the_form_of_the_labels_and_the_remedy(form: str, task: str) -> None:
    y, looks, give = FORMS[form]
    with pytest.raises(ConfigError) as caught:
        build(y, task=task)
    assert caught.value.key == "training.task"
    assert f"; these are {looks}: give {give}" in caught.value.problem
    assert "tokens" not in caught.value.problem
    assert ("regression" in caught.value.problem) is ("astype" in give)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", ["train", "test"])
def test_if_only_one_side_has_another_form_the_error_names_it(form: str, side: str) -> None:
    y, looks, give = FORMS[form]
    labels = {"train": Y, "test": Y} | {side: y}
    with pytest.raises(DataError) as caught:
        from_arrays("mine", (X, labels["train"]), (X, labels["test"]))
    assert f"both must agree: the {side} labels are {looks}; for classes give {give}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_real_targets_beside_integers_must_be_floats_in_both() -> None:
    with pytest.raises(DataError, match=r"test labels are int64 .* both must agree: for regression give floats"):
        from_arrays("mine", (X, Y + 0.5), (X, Y))


@pytest.mark.parametrize(
    "y",
    [Y, Y + 0.5, Y - 1.0, np.where(Y == 3, np.nan, Y), np.stack([Y, Y], 1), np.ones((40, 4)), np.zeros((40, 4, 2))],
)
def test_class_labels_and_other_targets_need_no_remedy(y: np.ndarray) -> None:
    assert label_remedy(y) is None


@pytest.mark.parametrize(
    ("task", "y", "outputs"),
    [
        ("regression", Y.astype(float), 1),
        ("regression", Y[:, None].astype(float), 1),
        ("regression", ONE_HOT.astype(float), 4),
        ("multilabel", ONE_HOT, 4),
    ],
)
def test_other_tasks_accept_these_forms_unchanged(task: str, y: np.ndarray, outputs: int) -> None:
    assert build(y, outputs, task=task).dataset.y_train.shape == y.shape
