"""Flower's grid as a ``Transport``: no call waits for a device, and the only exception is ``ConnectionError``.

A SuperNode announces its answer and then sends its parts. Flower's ``pull_messages`` waits for the last part of every
announced answer: one slow uplink would delay everybody, and one broken answer would take others along. So a separate
thread fetches each answer, and ``receive`` returns the complete ones.
"""

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
#: Seconds that ``receive`` waits for newly announced answers, and seconds before a failed fetch is retried.
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
        message_id = next(iter(_call(self._grid.push_messages, [message])), None)
        if not message_id:
            raise ConnectionError("the SuperLink did not take the message")
        return str(message_id)

    def receive(self, messages: list[str]) -> list[Reply]:
        """Return the complete answers. Cancel the fetch of answers that are no longer awaited."""
        for message_id in self.fetches.keys() - set(messages):
            self.fetches.pop(message_id).cancel()
        waiting = [message_id for message_id in messages if message_id not in self.fetches]
        started = _call(self._new_fetches, waiting) if waiting else []
        self.fetches |= {fetch.message_id: fetch for fetch in started}
        deadline = time.monotonic() + _PROMPT_SECONDS
        for fetch in started:
            fetch.start()
        for fetch in started:
            fetch.join(max(0.0, deadline - time.monotonic()))
        done = [fetch for fetch in self.fetches.values() if not fetch.is_alive()]
        for fetch in done:
            del self.fetches[fetch.message_id]
        return [fetch.reply for fetch in done]

    def close(self) -> None:
        """Cancel all fetches."""
        self.receive([])

    def _new_fetches(self, messages: list[str]) -> list["_Fetch"]:
        """Fetches for newly announced answers. The SuperLink announces once, and keeps the parts until confirmed."""
        client = self._grid._runtime_client
        found = client.PullMessages(PullAppMessagesRequest(message_ids=messages))
        fetches = []
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            single = PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree])
            message_id = str(message.metadata.reply_to_message_id)
            fetches.append(_Fetch(message_id, self._grid, _Client(client, single)))
        return fetches


class _Cancelled(Exception):
    """Nobody waits for this answer."""


class _Client:
    """Flower's client, restricted to one announced answer."""

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
    """Fetches one answer part by part, however long its device takes to send it."""

    def __init__(self, message_id: str, grid: Any, client: _Client) -> None:
        super().__init__(name=f"answer {message_id[:8]}", daemon=True)
        self.message_id, self.reply, self._client = (
            message_id,
            Reply(message_id, error="the fetch of its answer was cancelled"),
            client,
        )
        self._grid = copy.copy(grid)
        self._grid._client = client

    def cancel(self) -> None:
        self._client.cancelled.set()

    def run(self) -> None:
        try:
            while not self._client.cancelled.is_set():
                try:
                    self.reply = _reply(self.message_id, self._grid.pull_messages([self.message_id]))
                    return
                except httpx.TransportError:  # the SuperLink is down; it keeps unconfirmed parts
                    self._client.cancelled.wait(_RETRY_SECONDS)
        except _Cancelled:
            return
        except Exception as error:
            self.reply = Reply(self.message_id, error=f"its answer cannot be unpacked ({type(error).__name__})")


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Turn every failure into ``ConnectionError``: the SuperLink is down, or its answer makes no sense."""
    try:
        return function(*arguments)
    except Exception as error:
        raise ConnectionError(f"{type(error).__name__}: {error}"[:150]) from None


def _reply(message_id: str, found: list[Any]) -> Reply:
    if not found:
        return Reply(message_id, error="its answer is too large for the SuperLink")
    [message] = found
    if message.has_error():
        code, reason = int(message.error.code), str(message.error.reason or "")
        words = f" ({reason.strip()[-300:]})" if code == 2 else ""
        return Reply(message_id, error=ERRORS.get(code, f"error {code}") + words)
    return Reply(message_id, message.content)
