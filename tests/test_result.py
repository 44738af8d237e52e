"""What a run leaves behind, where its task has no accuracy."""

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from freshet import Federation, Result
from freshet.errors import ConfigError, RunError


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Result:
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    run = {"executor": "serial", "eval_every": 5.0}
    made = Federation(lambda: nn.Linear(3, 1), (x, x.sum(1)), (x, x.sum(1)), devices=4, task="regression", run=run)
    return made.run(10, out=Path(tmp_path_factory.mktemp("regression")) / "run")


def test_the_accuracy_of_a_regression_is_one_sentence_that_names_its_metric(regression: Result):
    with pytest.raises(RunError, match=r"^this run is judged by rmse and has no accuracy; use result\.values") as told:
        _ = regression.accuracy
    assert "result.frame()" in str(told.value) and "\n" not in str(told.value)


def test_the_accuracy_of_a_regression_counts_as_an_attribute_that_is_not_there(regression: Result):
    assert not hasattr(regression, "accuracy")
    assert getattr(regression, "accuracy", None) is None


def test_what_the_sentence_names_has_the_metrics(regression: Result):
    assert list(regression.frame()["rmse"]) == list(regression.values)
    assert len(regression.loss) == len(regression.values) > 0


def test_target_in_percent_gets_a_hint(finished):
    result = finished("fedavg")
    with pytest.raises(ConfigError, match=r"did you mean 0\.8\?"):
        result.time_to(80)
    assert result.time_to(1.01) is None
