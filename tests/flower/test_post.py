"""Flower's grid as the driver wants it: one kind of exception, errors in words."""

from typing import Any

import httpx
import pytest
from flwr.app import Error, Message, Metadata, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from freshet.cli.deploy import costs
from freshet.flower.server import ERRORS, FlowerPost


class Grid:
    """Fails, or hands out what it was given."""

    def __init__(self, problem: Exception | None = None, replies: tuple[Any, ...] = ()) -> None:
        self.problem, self.replies = problem, replies

    def _or_fail(self, result: Any) -> Any:
        if self.problem is not None:
            raise self.problem
        return result

    def get_node_ids(self) -> list[int]:
        return self._or_fail([3, 5])

    def push_messages(self, messages: list[Message]) -> list[str]:
        return self._or_fail([""])

    def pull_messages(self, numbers: list[str]) -> Any:
        return self._or_fail(self.replies)


def reply(**given: Any) -> Message:
    metadata = Metadata(1, "", 3, 1, "asked", "", 0.0, 600.0, "train")
    return Message(metadata=metadata, **given)


@pytest.mark.parametrize(
    "problem", [httpx.ConnectError("away"), OSError("broken"), ValueError("no such object type"), KeyError("ab12")]
)
def test_whatever_goes_wrong_is_a_connection_that_failed(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a device sends and Flower cannot unpack: it must not end the server."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    post = FlowerPost(Grid(problem))
    for call in (post.nodes, lambda: post.receive(["a"]), lambda: post.send(3, RecordDict(), 10.0)):
        with pytest.raises(ConnectionError, match=type(problem).__name__):
            call()
    with pytest.raises(ConnectionError, match="did not take"):
        FlowerPost(Grid()).send(3, RecordDict(), 10.0)


@pytest.mark.parametrize("code", [*ERRORS, 99])
def test_errors_become_words(code: int) -> None:
    [found] = FlowerPost(Grid(replies=(reply(error=Error(code, "a reason")),))).receive(["asked"])
    assert found.message == "asked" and found.content is None
    assert found.error.startswith(ERRORS.get(code, "error 99")) and ("a reason" in found.error) == (code == 2)


def test_an_answer_is_handed_on_with_the_number_of_its_message() -> None:
    [found] = FlowerPost(Grid(replies=(reply(content=RecordDict()),))).receive(["asked"])
    assert found.message == "asked" and not found.error and len(found.content) == 0


def test_where_a_trips_time_went_is_printed_by_phase() -> None:
    phases = {
        "down": 1.5,
        "start": 0.5,
        "import": 2.0,
        "load": 0.25,
        "train": 9.0,
        "up": 1.0,
        "whole": 14.25,
        "cpu": 3.0,
    }
    lines = costs({"uploads": 7, "messages": 9, "trips": 8, "trip_seconds": phases})
    assert lines[0] == "a trip in seconds (medians of 7, 9 messages for 8 trips):"
    assert [line.split()[2] for line in lines[1:]] == ["down", "start", "import", "load", "train", "up", "whole"]
    assert costs({"trip_seconds": {}}) == []
