"""The fresh-model service: a device in mid-training requests the newest model, beside the Flower messages.

Two calls over gRPC and TLS, both with the token of the trip: ``ask`` (slot -> fresh model, or nothing newer) and
``hurry`` (-> whether the server wants the upload soon). The service holds no state; it calls the driver.
"""

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import numpy as np

from freshet.core.messages import UNREAD, Fresh, Packed, Slot
from freshet.core.server import RequestRefused
from freshet.errors import RunError
from freshet.files import open_many
from freshet.flower.wire import MalformedMessage, check_packed, from_bytes, to_bytes

_log = logging.getLogger(__name__)
SERVICE = "freshet.Fresh"
#: A request is a few numbers and a token. A longer one is refused unread.
MAX_REQUEST_BYTES = 4096
_THREADS = 8
#: Maximum connections and concurrent requests. More are turned away, so that strangers cannot use up file descriptors.
_MAX_CONNECTIONS, _MAX_REQUESTS = 4096, 1024
#: Seconds after which a connection without handshake, or without requests, is closed.
_HANDSHAKE_SECONDS, _IDLE_SECONDS = 10, 60
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class FreshSource(Protocol):
    """What the service calls: the driver."""

    def answer(self, device: int, trip: int, token: str, slot: Slot) -> Fresh | None:
        """The fresh model, or None if there is nothing newer.

        Raises ``RequestRefused``, or ``ConnectionError`` if the device should try again.
        """

    def is_urgent(self, device: int, trip: int, token: str) -> bool:
        """Whether the server wants this trip's upload soon. Raises the same."""


class FreshService:
    """Serves requests until it is closed."""

    def __init__(self, source: FreshSource, bind: str, key: bytes, certificate: bytes) -> None:
        self._source = source
        pool, options = ThreadPoolExecutor(_THREADS), [*_limits(open_many()), ("grpc.so_reuseport", 0)]
        self._server = grpc.server(pool, options=options, maximum_concurrent_rpcs=_MAX_REQUESTS)
        calls = {"ask": self._ask, "hurry": self._hurry}
        handlers = {name: grpc.unary_unary_rpc_method_handler(_guard(call)) for name, call in calls.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port = self._server.add_secure_port(bind, grpc.ssl_server_credentials([(key, certificate)]))
        except RuntimeError:
            port = 0
        if not port:
            raise RunError(f"the fresh-model service cannot listen on {bind}; choose another fresh_port in server.toml")
        self.port = port
        self._server.start()

    def close(self) -> None:
        self._server.stop(1.0)

    def _ask(self, request: dict[str, Any]) -> bytes:
        slot = Slot(_integer(request, "epoch"), str(request.get("by", ""))[:20], _integer(request, "action"))
        device, trip, token = _integer(request, "device"), _integer(request, "trip"), str(request.get("token", ""))
        fresh = self._source.answer(device, trip, token, slot)
        if fresh is None:
            return to_bytes({"newer": False})
        return to_bytes(_fresh_tree(fresh))

    def _hurry(self, request: dict[str, Any]) -> bytes:
        device, trip, token = _integer(request, "device"), _integer(request, "trip"), str(request.get("token", ""))
        return b"1" if self._source.is_urgent(device, trip, token) else b"0"


def _fresh_tree(fresh: Fresh) -> dict[str, Any]:
    """An answer as plain values and arrays. A compressed model is sent without its weights."""
    packed = fresh.packed
    model = {"weights": fresh.weights} if packed is None else {"packed": list(packed)}
    return {"newer": True, "version": fresh.version, "age": fresh.age, "vectors": dict(fresh.vectors)} | model


def _limits(files: int) -> list[tuple[str, int]]:
    """Limit what a client without token can use of a process that may open ``files`` files: at most half of them."""
    return [
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_allowed_incoming_connections", min(_MAX_CONNECTIONS, files // 2)),
        ("grpc.max_concurrent_streams", _THREADS),
        ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_SECONDS),
        ("grpc.max_connection_idle_ms", 1000 * _IDLE_SECONDS),
    ]


def _guard(call: Callable[[dict[str, Any]], bytes]) -> Callable[[bytes, Any], bytes]:
    """Refuse bad requests with a reason. Other failures reveal nothing to the client."""

    def handle(request: bytes, context: Any) -> bytes:
        try:
            fields = json.loads(request)
            if not isinstance(fields, dict):
                raise MalformedMessage("invalid request")
            return call(fields)
        except RequestRefused as refusal:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(refusal))
        except ConnectionError as problem:  # the device tries again
            context.abort(grpc.StatusCode.UNAVAILABLE, str(problem))
        except (MalformedMessage, ValueError, RecursionError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "invalid request")
        raise AssertionError("abort() raises")

    return handle


def _integer(request: dict[str, Any], key: str) -> int:
    value = request.get(key)
    if type(value) is not int or abs(value) >= 2**53:
        raise MalformedMessage(f"{key} is not an integer")
    return value


class NoFreshAnswer(Exception):
    """The service gave no usable answer. The text says why."""


class FreshClient:
    """The device's side, for one trip."""

    def __init__(self, address: str, certificate: str, device: int, trip: int, token: str) -> None:
        credentials = grpc.ssl_channel_credentials(certificate.encode())
        self._channel = grpc.secure_channel(address, credentials, [*_UNLIMITED, ("grpc.enable_http_proxy", 0)])
        self._who = {"device": device, "trip": trip, "token": token}

    def close(self) -> None:
        self._channel.close()

    def ask(self, slot: Slot, base: int, size: int, seconds: float = 30.0, tries: int = 3) -> Fresh | None:
        """The fresh model, or None if there is nothing newer. Raises ``NoFreshAnswer`` after ``tries`` attempts."""
        request = self._who | {"epoch": slot.epoch, "by": slot.by, "action": slot.action}
        for left in reversed(range(tries)):
            try:
                return _read_fresh(from_bytes(self._call("ask", request, seconds)), base, size)
            except grpc.RpcError as error:
                final = error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)
                if final or not left:
                    raise NoFreshAnswer(f"{error.code().name.lower()}: {error.details()}"[:150]) from None
                time.sleep(0.5)
            except MalformedMessage as problem:
                raise NoFreshAnswer(str(problem)[:150]) from None
        raise AssertionError("the last try returns or raises")

    def is_urgent(self) -> bool:
        """Whether the server wants the upload soon. False if the service cannot be reached."""
        try:
            return self._call("hurry", self._who, 5.0) == b"1"
        except grpc.RpcError:
            return False

    def _call(self, name: str, request: dict[str, Any], seconds: float) -> bytes:
        reply: bytes = self._channel.unary_unary(f"/{SERVICE}/{name}")(json.dumps(request).encode(), timeout=seconds)
        return reply


_UNFIT = "the fresh model is not newer, or has another size"


def _read_fresh(tree: dict[str, Any], base: int, size: int) -> Fresh | None:
    """Read an answer. Raises ``MalformedMessage`` unless the fresh model can be merged, or at least decoded."""
    if tree.get("newer") is False:
        return None
    version, age, vectors = (tree.get(key) for key in ("version", "age", "vectors"))
    if type(version) is not int or type(age) is not int or not isinstance(vectors, dict) or version <= base:
        raise MalformedMessage(_UNFIT)
    if "packed" in tree:
        return Fresh(version, age, UNREAD, vectors, _read_packed(tree["packed"]))
    weights = tree.get("weights")
    if not isinstance(weights, np.ndarray) or weights.shape != (size,) or weights.dtype != np.float32:
        raise MalformedMessage(_UNFIT)
    return Fresh(version, age, weights, vectors)


def _read_packed(found: object) -> Packed:
    if not isinstance(found, list) or len(found) != len(Packed._fields):
        raise MalformedMessage("the fresh model is not readable")
    codec, held, arrays = found
    named = isinstance(codec, str) and isinstance(held, str) and isinstance(arrays, dict)
    if not named or not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise MalformedMessage("the fresh model is not readable")
    return check_packed(Packed(codec, held, arrays))
