"""A SuperNode that has stopped working ends, so that its supervisor can restart it."""

import importlib
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
