"""A SuperNode that has stopped working ends, so that its supervisor can restart it."""

import importlib
import inspect
import os
import sys

import pytest

from freshet.flower import node


@pytest.mark.parametrize(
    ("end", "code"), [(RuntimeError("handshake"), 1), (SystemExit(305), 305), (SystemExit(None), 0), (None, 1)]
)
def test_supernode_that_stopped_working_exits(
    end: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        if end is not None:
            raise end

    codes: list[int] = []
    importlib.import_module("flwr.supernode.cli.flower_supernode")
    monkeypatch.setattr(sys.modules["flwr.supernode.cli.flower_supernode"], "flower_supernode", work)
    monkeypatch.setattr(os, "_exit", codes.append)
    node.main()
    assert codes == [code]


def test_pauses_are_short_after_a_message_and_grow_to_flowers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is heard soon, and a thousand idle ones do not keep the server busy."""
    now, slept = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(node.time, "sleep", sleep)
    monkeypatch.setattr(node.time, "monotonic", lambda: now[0])
    pauses = node.NodePauses()
    for _ in range(40):
        pauses.sleep(3)
    assert slept[0] == 0.2 and slept == sorted(slept) and slept[-1] == 3.0 and sum(slept[:10]) < 4.0
    pauses.sleep(0.5)
    pauses.sleep(3)
    assert slept[-2:] == [0.05, 0.2]
    assert pauses.monotonic() == now[0], "everything else is the module's"


def test_flowers_loop_sleeps_as_we_think() -> None:
    """Shorter pauses hold only as long as Flower's loop asks for these."""
    source = inspect.getsource(importlib.import_module("flwr.supernode.start_client_internal"))
    assert source.count("time.sleep(3)") == 1 and source.count("time.sleep(0.5)") == 2
