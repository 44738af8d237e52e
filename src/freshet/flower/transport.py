"""Flower's grid as the driver wants it: no call waits for a device, ``ConnectionError`` only, errors as texts.

A SuperNode announces its answer and then sends the parts of it, and Flower's ``pull_messages`` waits for the last part
of all that is announced: one thin uplink would hold up everybody, one answer that cannot be unpacked take others along.
So every answer is fetched by a thread of its own, and ``receive`` hands out those that are whole."""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

from freshet.flower.driver import Reply

#: What Flower's error codes mean for a trip.
ERRORS = {
    1: "the device could not load its app",
    2: "the device's app failed",
    3: "the message expired before the device answered, or was lost",
    4: "the device's answer expired",
    5: "the device is gone",
    7: "the device could not unpack its app",
    8: "the device's app crashed",
}
#: Seconds that ``receive`` gives answers that have just been announced, and after which a broken fetch is tried again.
_PROMPT_SECONDS, _RETRY_SECONDS = 0.05, 1.0


class FlowerTransport:
    """Carries messages over Flower's grid."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.fetches: dict[str, _Fetch] = {}

    def nodes(self) -> set[int]:
        return set(_call(self._grid.get_node_ids))

    def send(self, node: int, content: Any, seconds: float) -> str:
        message = Message(content, node, "train", ttl=seconds)
        number = next(iter(_call(self._grid.push_messages, [message])), None)
        if not number:
            raise ConnectionError("the SuperLink did not take the message")
        return str(number)

    def receive(self, messages: list[str]) -> list[Reply]:
        """Those answers that are whole; one that nobody waits for any more is given up."""
        for number in self.fetches.keys() - set(messages):
            self.fetches.pop(number).cancel()
        waiting = [number for number in messages if number not in self.fetches]
        begun = _call(self._new_fetches, waiting) if waiting else []
        self.fetches |= {fetch.number: fetch for fetch in begun}
        prompt = time.monotonic() + _PROMPT_SECONDS
        for fetch in begun:
            fetch.start()
        for fetch in begun:
            fetch.join(max(0.0, prompt - time.monotonic()))
        done = [fetch for fetch in self.fetches.values() if not fetch.is_alive()]
        for fetch in done:
            del self.fetches[fetch.number]
        return [fetch.reply for fetch in done]

    def close(self) -> None:
        """Give up what is still on its way."""
        self.receive([])

    def _new_fetches(self, messages: list[str]) -> list["_Fetch"]:
        """What the SuperLink has of these; it says so once, and keeps the parts until their receipt is confirmed."""
        client = self._grid._runtime_client
        found = client.PullMessages(PullAppMessagesRequest(message_ids=messages))
        fetches = []
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            alone = PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree])
            number = str(message.metadata.reply_to_message_id)
            fetches.append(_Fetch(number, self._grid, _Client(client, alone)))
        return fetches


class _Cancelled(Exception):
    """Nobody waits for this answer any more."""


class _Client:
    """Flower's client, for which only one answer is announced."""

    def __init__(self, client: Any, announced: PullAppMessagesResponse) -> None:
        self._client, self._announced, self.cancelled = client, announced, threading.Event()

    def PullMessages(self, _: Any) -> PullAppMessagesResponse:  # noqa: N802
        return self._announced

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        if self.cancelled.is_set():
            raise _Cancelled
        return self._client.PullObject(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _Fetch(threading.Thread):
    """Fetches one answer part by part, however long its device takes to send them."""

    def __init__(self, number: str, grid: Any, client: _Client) -> None:
        super().__init__(name=f"answer {number[:8]}", daemon=True)
        self.number, self.reply, self._client = number, Reply(number, error="its answer was given up"), client
        self._grid = copy.copy(grid)
        self._grid._client = client

    def cancel(self) -> None:
        self._client.cancelled.set()

    def run(self) -> None:
        try:
            while not self._client.cancelled.is_set():
                try:
                    self.reply = _reply(self.number, self._grid.pull_messages([self.number]))
                    return
                except httpx.TransportError:  # the SuperLink is away; it keeps what is not confirmed
                    self._client.cancelled.wait(_RETRY_SECONDS)
        except _Cancelled:
            return
        except Exception as error:
            self.reply = Reply(self.number, error=f"its answer cannot be unpacked ({type(error).__name__})")


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Whatever fails: a SuperLink that is away, or one that answers what nobody understands."""
    try:
        return function(*arguments)
    except Exception as error:
        raise ConnectionError(f"{type(error).__name__}: {error}"[:150]) from None


def _reply(number: str, found: list[Any]) -> Reply:
    if not found:
        return Reply(number, error="its answer is too large for the SuperLink")
    [message] = found
    if message.has_error():
        code, reason = int(message.error.code), str(message.error.reason or "")
        words = f" ({reason.strip()[-300:]})" if code == 2 else ""
        return Reply(number, error=ERRORS.get(code, f"error {code}") + words)
    return Reply(number, message.content)
