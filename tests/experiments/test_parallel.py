"""Independent calls in one process or several, and a clean end at Ctrl-C."""

import os
import signal

import pytest

from freshet.experiments.compare import run_each
from freshet.runs.lifecycle import interruptible


def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("workers", [1, 2])
def test_every_item_gets_its_result(workers):
    found = {}
    assert run_each(square, [1, 2, 3], workers, found.__setitem__)
    assert found == {1: 1, 2: 4, 3: 9}


def test_no_items_are_no_work():
    assert run_each(square, [], 4, lambda item, outcome: pytest.fail("nothing to do"))


def test_a_call_that_was_interrupted_ends_the_rest():
    seen = []
    assert not run_each(lambda item: None if item == 2 else item, [1, 2, 3], 1, lambda item, _: seen.append(item))
    assert seen == [1]


def test_ctrl_c_during_a_call_keeps_its_result_and_ends_the_rest():
    def press(item):
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
        return item

    seen = []
    assert not run_each(press, [1, 2], 1, lambda item, _: seen.append(item))
    assert seen == [1]
