"""A class that a file has not: the file is called by its name, and what it has is named."""

import pytest

from freshet import ConfigError
from freshet.methods import class_and_preset

HAS = "import freshet\nclass Mine(freshet.Method): ...\nclass Yours(freshet.Method): ...\nclass Other: ...\n"


@pytest.mark.parametrize(
    ("content", "has"), [(HAS, "it has Mine, Yours"), ("x = 1", "it has no subclass of freshet.Method")]
)
def test_the_file_and_its_classes_are_named(content, has, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        class_and_preset(f"{path}:Nope")
    assert str(caught.value).endswith(f"(module '{path}' has no attribute 'Nope'); {has}")


def test_an_error_of_the_file_itself_is_told_as_it_is(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import math\nmath.nope")
    with pytest.raises(ConfigError, match=r"cannot be imported \(module 'math' has no attribute 'nope'\)$"):
        class_and_preset(f"{path}:Nope")
