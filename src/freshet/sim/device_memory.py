"""What each device remembers between its trips. It belongs to the device: the server never reads it."""

import json
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from freshet.compute.executor import Future
from freshet.core.method import Memory
from freshet.files import writing
from freshet.runs.arrays import LazyArray, contents, serialise, views
from freshet.runs.checkpoint import copy_arrays, pack, unpack
from freshet.training.trip import Outcome

#: Half a gibibyte of device memories stays in main memory unless a run says otherwise.
DEFAULT_LIMIT_BYTES = 512 * 2**20
#: Trips that nobody waits for and whose outcome is still to come.
MAX_PENDING = 32


class DeviceStore:
    """Memory by device; a trip's effect on it may still be under way when the device is next asked.

    At most ``limit_bytes`` of arrays stay in main memory. Beyond that the devices that were not asked for longest go to
    ``folder``, one safetensors file each (arrays as tensors, all else as JSON in its header), and come back bit for bit
    when they are needed. The folder is made at the first need, emptied of what a killed run has left there, and removed
    at the end. Numbers alone are never spilled. What is handed out (a trip in flight) counts no more.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._folder, self._made = folder, False
        self._memory: OrderedDict[int, Memory] = OrderedDict()  # the longest unused first
        self._pending: dict[int, Future[Outcome]] = {}
        self._spilled: set[int] = set()
        self._bytes = 0
        self._trips: dict[int, tuple[int, float]] = {}

    # ---- memories

    def get(self, device: int) -> Memory:
        """What the device remembers now (waits for its last trip if need be). Not to be changed in place."""
        if device in self._pending:
            self.put(device, self._pending.pop(device).result().memory)
        memory = self._memory.get(device)
        if memory is not None:
            self._memory.move_to_end(device)
            return memory
        if device not in self._spilled:
            return {}
        memory = self._load(device)
        self.put(device, memory)
        return memory

    def put(self, device: int, memory: Memory) -> None:
        """The device's memory after a trip."""
        if not memory:
            return
        self._bytes += array_bytes(memory) - array_bytes(self._memory.get(device, {}))
        self._memory[device] = memory
        self._memory.move_to_end(device)
        if device in self._spilled:
            self._spilled.discard(device)
            self._path(device).unlink(missing_ok=True)
        self._spill()

    def defer(self, device: int, outcome: Future[Outcome]) -> None:
        """The device's memory will be what this trip leaves; nobody needs it yet.

        What is there is taken in, and so are the oldest of more than a few: a trip's outcome holds a whole model.
        """
        self._pending[device] = outcome
        for known in [device for device, outcome in self._pending.items() if outcome.done()]:
            self.get(known)
        while len(self._pending) > MAX_PENDING:
            self.get(next(iter(self._pending)))

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of arrays that are held in main memory."""
        return self._bytes

    @property
    def spilled_count(self) -> int:
        """Devices whose memory is in a file."""
        return len(self._spilled)

    def close(self) -> None:
        """Remove what was spilled, now: later the folder may be that of the same run, gone on with by another store.
        What is still under way is not needed any more, and refers to who would train it."""
        self._pending.clear()
        if self._made:
            self._remove()

    # ---- how long trips take

    def record_trip(self, device: int, seconds: float) -> None:
        """A trip of the device has ended with an upload, so long after it was triggered."""
        count, total = self._trips.get(device, (0, 0.0))
        self._trips[device] = (count + 1, total + seconds)

    def mean_seconds(self, device: int) -> float | None:
        """Mean duration of the device's completed trips; None before the first."""
        count, total = self._trips.get(device, (0, 0.0))
        return total / count if count else None

    # ---- checkpoint

    def state(self) -> dict[str, Any]:
        """Everything, with nothing left under way, as nested dicts of plain values and arrays (those on disk stay
        there until they are written)."""
        for device in sorted(self._pending):
            self.get(device)
        memories = self._memory | {device: self._lazy_memory(device) for device in self._spilled}
        return {
            "memory": {str(device): memories[device] for device in sorted(memories)},
            "trips": {str(device): list(trips) for device, trips in sorted(self._trips.items())},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``, into an empty store; arrays are copied, one device after the other."""
        for device, memory in state["memory"].items():
            self.put(int(device), copy_arrays(memory))
        self._trips = {int(device): (int(count), float(total)) for device, (count, total) in state["trips"].items()}

    # ---- files

    def _spill(self) -> None:
        """Move the longest unused memories to files until the rest fits."""
        if self._bytes <= self.limit_bytes:
            return
        for device in list(self._memory):
            size = array_bytes(self._memory[device])
            if size == 0:
                continue
            self._save(device, self._memory.pop(device))
            self._spilled.add(device)
            self._bytes -= size
            if self._bytes <= self.limit_bytes:
                return

    def _save(self, device: int, memory: Memory) -> None:
        plain, arrays = pack(dict(memory))
        path = self._path(device)
        with writing(path, "mend that, then resume the run"), path.open("wb") as file:
            file.writelines(serialise(arrays, {"memory": json.dumps(plain)}))

    def _load(self, device: int) -> Memory:
        with self._path(device).open("rb") as file:
            return self._rebuild(file, {name: np.array(view) for name, view in views(file).items()})

    def _lazy_memory(self, device: int) -> Memory:
        """A spilled memory whose arrays stay on disk."""
        path = self._path(device)

        def load(name: str) -> Callable[[], NDArray[Any]]:
            def one() -> NDArray[Any]:
                with path.open("rb") as file:
                    return np.array(views(file)[name])

            return one

        with path.open("rb") as file:
            kept, _ = contents(file)
            return self._rebuild(file, {name: LazyArray(a.shape, a.dtype, load(name)) for name, a in kept.items()})

    @staticmethod
    def _rebuild(file: BinaryIO, arrays: Mapping[str, Any]) -> Memory:
        """All of a spilled memory, as it was; its arrays are these."""
        _, notes = contents(file)
        memory: Memory = unpack(json.loads(notes["memory"]), arrays)
        return memory

    def _path(self, device: int) -> Path:
        if not self._made:
            shutil.rmtree(self._folder, ignore_errors=True)  # a link is left alone, and refused below
            with writing(self._folder, "remove it, then resume the run"):
                self._folder.mkdir(parents=True)
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._made = True
        return self._folder / f"device-{device}.safetensors"


def array_bytes(memory: Memory) -> int:
    """Bytes of the arrays in a memory."""
    return sum(value.nbytes for value in memory.values() if isinstance(value, np.ndarray))
