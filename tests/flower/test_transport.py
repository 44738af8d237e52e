"""Flower's grid as the driver wants it: no waiting for a device, one kind of exception, errors in words."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from freshet.flower.driver import Reply
from freshet.flower.transport import ERRORS, FlowerTransport

Objects = dict[str, bytes]


class Client:
    """A SuperLink: it announces each answer once, and keeps its parts until they are confirmed."""

    def __init__(self, *answers: tuple[Message, Any, Objects]) -> None:
        self.announced = {answer.metadata.reply_to_message_id: (answer, tree) for answer, tree, _ in answers}
        self.objects = {number: part for _, _, objects in answers for number, part in objects.items()}
        self.late: set[str] = set()
        self.problem: Exception | None = None
        self.asked: list[str] = []
        self.confirmed: list[str] = []

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802
        if self.problem is not None:
            raise self.problem
        found = [self.announced.pop(number) for number in list(self.announced) if number in request.message_ids]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(answer)) for answer, _ in found],
            message_object_trees=[tree for _, tree in found],
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.asked.append(request.object_id)
        if self.problem is not None:
            raise self.problem
        there = request.object_id not in self.late
        return SimpleNamespace(
            object_found=True, object_available=there, object_content=self.objects[request.object_id] if there else b""
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)


def reply(number: str = "asked", **given: Any) -> Message:
    answer = make_message(metadata=Metadata(1, "", 3, 1, number, "", 0.0, 600.0, "train"), **given)
    answer.metadata.__dict__["_message_id"] = answer.object_id
    return answer


def sent(answer: Message) -> tuple[Message, Any, Objects]:
    """An answer as a device sends it: announced, with its tree and its parts."""
    parts = {number: part.deflate() for number, part in get_all_nested_objects(answer).items()}
    return answer, get_object_tree(answer), parts


def garbled(number: str) -> tuple[Message, Any, Objects]:
    """An answer whose content has the right header, so that the SuperLink takes it, and nonsense behind it."""
    answer, nonsense = reply(number, content=records()), b"RecordDict  7\x00garbage"
    [child] = answer.children
    whole = answer.deflate().replace(child.encode(), get_object_id(nonsense).encode())
    answer.metadata.__dict__["_message_id"] = get_object_id(whole)
    tree = ObjectTree(object_id=get_object_id(whole), children=[ObjectTree(object_id=get_object_id(nonsense))])
    return answer, tree, {get_object_id(each): each for each in (whole, nonsense)}


def records(ticket: str = "x") -> RecordDict:
    return RecordDict({"answer": ConfigRecord({"ticket": ticket})})


def post_over(client: Client) -> FlowerTransport:
    """The post over Flower's own grid, with a SuperLink of ours behind it."""
    grid: Any = HttpGrid(token="t")
    grid._run, grid._client = SimpleNamespace(run_id=1), client
    return FlowerTransport(grid)


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60.0
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.01)


class Grid:
    """Fails, or takes no message."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem

    def _or_fail(self, result: Any) -> Any:
        if self.problem is not None:
            raise self.problem
        return result

    def get_node_ids(self) -> list[int]:
        return self._or_fail([3, 5])

    def push_messages(self, messages: list[Message]) -> list[str]:
        return self._or_fail([""])

    @property
    def _runtime_client(self) -> Any:
        return self._or_fail(None)


@pytest.mark.parametrize(
    "problem", [httpx.ConnectError("away"), OSError("broken"), ValueError("no such object type"), KeyError("ab12")]
)
def test_whatever_goes_wrong_is_a_connection_that_failed(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a device sends and Flower cannot unpack: it must not end the server."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    post = FlowerTransport(Grid(problem))
    for call in (post.nodes, lambda: post.receive(["a"]), lambda: post.send(3, RecordDict(), 10.0)):
        with pytest.raises(ConnectionError, match=type(problem).__name__):
            call()
    with pytest.raises(ConnectionError, match="did not take"):
        FlowerTransport(Grid()).send(3, RecordDict(), 10.0)


@pytest.mark.parametrize("code", [*ERRORS, 99])
def test_errors_become_words(code: int) -> None:
    [found] = post_over(Client(sent(reply(error=Error(code, "a reason"))))).receive(["asked"])
    assert found.message == "asked" and found.content is None
    assert found.error.startswith(ERRORS.get(code, "error 99")) and ("a reason" in found.error) == (code == 2)


def test_an_answer_is_handed_on_once_with_the_number_of_its_message() -> None:
    client = Client(sent(reply(content=records())))
    post = post_over(client)
    [found] = post.receive(["asked"])
    assert found.message == "asked" and not found.error and found.content["answer"]["ticket"] == "x"
    assert post.receive(["asked"]) == [] and len(client.confirmed) == 1


def test_a_device_that_stops_in_mid_upload_holds_up_nobody_else() -> None:
    """Flower's own call waits for the last part of everything that is announced."""
    slow, other = sent(reply("slow", content=records("a"))), sent(reply("other", content=records("b")))
    client = Client(slow, other)
    client.late = set(slow[2])
    post, found = post_over(client), list[str]()
    until(lambda: bool(found.extend(each.message for each in post.receive(["slow", "other"])) or found))
    assert found == ["other"]
    client.late = set()  # the rest has come
    until(lambda: bool(found.extend(each.message for each in post.receive(["slow"])) or found[1:]))
    assert found == ["other", "slow"]


def test_an_answer_that_nobody_waits_for_any_more_is_given_up() -> None:
    slow = sent(reply("slow", content=records()))
    client = Client(slow)
    client.late = set(slow[2])
    post = post_over(client)
    assert post.receive(["slow"]) == []
    [fetch] = post.fetches.values()
    post.close()
    fetch.join(60.0)
    assert not fetch.is_alive() and post.fetches == {} and client.confirmed == []


def test_an_answer_that_cannot_be_unpacked_takes_no_other_along() -> None:
    post, found = post_over(Client(garbled("bad"), sent(reply("good", content=records())))), dict[str, Reply]()
    until(lambda: bool(found.update({each.message: each for each in post.receive(["bad", "good"])}) or len(found) == 2))
    assert found["bad"].error == "its answer cannot be unpacked (JSONDecodeError)" and found["bad"].content is None
    assert not found["good"].error and found["good"].content is not None


def test_an_announced_answer_survives_a_superlink_that_is_away_for_a_while() -> None:
    class Away(Client):
        def PullObject(self, request: Any) -> Any:  # noqa: N802
            if len(self.asked) < 3:
                self.asked.append(request.object_id)
                raise httpx.ConnectError("away")
            return super().PullObject(request)

    post, found = post_over(Away(sent(reply(content=records())))), list[Reply]()
    until(lambda: bool(found.extend(post.receive(["asked"])) or found))
    assert [(each.message, each.error) for each in found] == [("asked", "")]
