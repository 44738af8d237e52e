"""Flower's grid as a transport: no waiting for a device, one kind of exception, errors as text."""

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
    """A fake SuperLink: announces each answer once, and keeps its parts until they are confirmed."""

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
    """An answer as a device sends it: the message, its tree and its parts."""
    parts = {number: part.deflate() for number, part in get_all_nested_objects(answer).items()}
    return answer, get_object_tree(answer), parts


def garbled(number: str) -> tuple[Message, Any, Objects]:
    """An answer with a valid header, so that the SuperLink accepts it, and nonsense behind it."""
    answer, nonsense = reply(number, content=records()), b"RecordDict  7\x00garbage"
    [child] = answer.children
    whole = answer.deflate().replace(child.encode(), get_object_id(nonsense).encode())
    answer.metadata.__dict__["_message_id"] = get_object_id(whole)
    tree = ObjectTree(object_id=get_object_id(whole), children=[ObjectTree(object_id=get_object_id(nonsense))])
    return answer, tree, {get_object_id(each): each for each in (whole, nonsense)}


def records(ticket: str = "x") -> RecordDict:
    return RecordDict({"answer": ConfigRecord({"ticket": ticket})})


def transport_over(client: Client) -> FlowerTransport:
    """The transport over Flower's own grid, with the fake SuperLink behind it."""
    grid: Any = HttpGrid(token="t")
    grid._run, grid._client = SimpleNamespace(run_id=1), client
    return FlowerTransport(grid)


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60.0
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.01)


class Grid:
    """A grid that fails, or accepts no message."""

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
def test_every_failure_is_a_connection_error(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes answers that Flower cannot unpack: they must not end the server."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    transport = FlowerTransport(Grid(problem))
    for call in (transport.nodes, lambda: transport.receive(["a"]), lambda: transport.send(3, RecordDict(), 10.0)):
        with pytest.raises(ConnectionError, match=type(problem).__name__):
            call()
    with pytest.raises(ConnectionError, match="did not take"):
        FlowerTransport(Grid()).send(3, RecordDict(), 10.0)


@pytest.mark.parametrize("code", [*ERRORS, 99])
def test_error_codes_become_text(code: int) -> None:
    [found] = transport_over(Client(sent(reply(error=Error(code, "a reason"))))).receive(["asked"])
    assert found.message == "asked" and found.content is None
    assert found.error.startswith(ERRORS.get(code, "error 99")) and ("a reason" in found.error) == (code == 2)


def test_answer_is_returned_once_with_its_message_id() -> None:
    client = Client(sent(reply(content=records())))
    transport = transport_over(client)
    [found] = transport.receive(["asked"])
    assert found.message == "asked" and not found.error and found.content["answer"]["ticket"] == "x"
    assert transport.receive(["asked"]) == [] and len(client.confirmed) == 1


def test_slow_upload_delays_nobody_else() -> None:
    """Flower's own call waits for the last part of every announced answer."""
    slow, other = sent(reply("slow", content=records("a"))), sent(reply("other", content=records("b")))
    client = Client(slow, other)
    client.late = set(slow[2])
    transport, found = transport_over(client), list[str]()
    until(lambda: bool(found.extend(each.message for each in transport.receive(["slow", "other"])) or found))
    assert found == ["other"]
    client.late = set()  # the rest has arrived
    until(lambda: bool(found.extend(each.message for each in transport.receive(["slow"])) or found[1:]))
    assert found == ["other", "slow"]


def test_fetch_that_nobody_waits_for_is_cancelled() -> None:
    slow = sent(reply("slow", content=records()))
    client = Client(slow)
    client.late = set(slow[2])
    transport = transport_over(client)
    assert transport.receive(["slow"]) == []
    [fetch] = transport.fetches.values()
    transport.close()
    fetch.join(60.0)
    assert not fetch.is_alive() and transport.fetches == {} and client.confirmed == []


def test_broken_answer_does_not_affect_others() -> None:
    transport, found = (
        transport_over(Client(garbled("bad"), sent(reply("good", content=records())))),
        dict[str, Reply](),
    )
    until(
        lambda: bool(
            found.update({each.message: each for each in transport.receive(["bad", "good"])}) or len(found) == 2
        )
    )
    assert found["bad"].error == "its answer cannot be unpacked (JSONDecodeError)" and found["bad"].content is None
    assert not found["good"].error and found["good"].content is not None


def test_announced_answer_survives_a_superlink_outage() -> None:
    class Away(Client):
        def PullObject(self, request: Any) -> Any:  # noqa: N802
            if len(self.asked) < 3:
                self.asked.append(request.object_id)
                raise httpx.ConnectError("away")
            return super().PullObject(request)

    transport, found = transport_over(Away(sent(reply(content=records())))), list[Reply]()
    until(lambda: bool(found.extend(transport.receive(["asked"])) or found))
    assert [(each.message, each.error) for each in found] == [("asked", "")]
