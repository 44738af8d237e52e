"""What each device remembers between its trips. It belongs to the device: the server never reads it."""

from collections.abc import Callable
from typing import Any

from freshet.core.method import Memory


class DeviceStore:
    """Memory by device; a trip's effect on it may still be under way when the device is next asked."""

    def __init__(self) -> None:
        self._memory: dict[int, Memory] = {}
        self._pending: dict[int, Callable[[], Memory]] = {}

    def get(self, device: int) -> Memory:
        """What the device remembers now (waits for its last trip if need be)."""
        pending = self._pending.pop(device, None)
        if pending is not None:
            self.put(device, pending())
        return self._memory.get(device, {})

    def put(self, device: int, memory: Memory) -> None:
        """The device's memory after a trip."""
        if memory:
            self._memory[device] = memory

    def defer(self, device: int, memory: Callable[[], Memory]) -> None:
        """The device's memory will be this; it is computed when somebody needs it."""
        self._pending[device] = memory

    def settle(self) -> dict[int, Memory]:
        """Everything, with nothing left under way."""
        for device in sorted(self._pending):
            self.get(device)
        return self._memory

    def state(self) -> dict[str, Any]:
        return {str(device): memory for device, memory in self.settle().items()}
