"""What each device remembers between its trips. The memory belongs to the device; the server never reads it."""

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
from freshet.runs.checkpoint import LazyArray, contents, copy_arrays, pack, serialise, unpack, views
from freshet.training.trip import TripOutcome

#: Bytes of device memories that stay in main memory by default.
DEFAULT_LIMIT_BYTES = 512 * 2**20
#: Trips with a pending outcome that nothing waits for.
MAX_PENDING = 32


class DeviceStore:
    """Memory by device. The outcome of a trip may still be pending.

    At most ``limit_bytes`` of arrays stay in main memory. Beyond that the least recently used memories are spilled to
    ``folder``: one safetensors file per device, with arrays as tensors and the rest as JSON in the header. They are
    loaded again, bit for bit, when they are needed. The folder is created at the first spill, cleared of the files of a
    killed run, and removed at the end. A memory without arrays is never spilled. Memories handed out to trips in flight
    do not count.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._folder, self._folder_made = folder, False
        self._memory: OrderedDict[int, Memory] = OrderedDict()  # least recently used first
        self._pending: dict[int, Future[TripOutcome]] = {}
        self._spilled: set[int] = set()
        self._bytes = 0
        self._trips: dict[int, tuple[int, float]] = {}

    # ---- memories

    def get(self, device: int) -> Memory:
        """Return the device's memory, after waiting for its last trip if needed. Do not change it in place."""
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
        """Store the device's memory after a trip."""
        if not memory:
            return
        self._bytes += array_bytes(memory) - array_bytes(self._memory.get(device, {}))
        self._memory[device] = memory
        self._memory.move_to_end(device)
        if device in self._spilled:
            self._spilled.discard(device)
            self._path(device).unlink(missing_ok=True)
        self._spill()

    def defer(self, device: int, outcome: Future[TripOutcome]) -> None:
        """Take the device's memory from this trip's outcome later.

        An outcome holds a whole model, so finished ones are stored now. Beyond ``MAX_PENDING`` the oldest are awaited.
        """
        self._pending[device] = outcome
        for done in [device for device, outcome in self._pending.items() if outcome.done()]:
            self.get(done)
        while len(self._pending) > MAX_PENDING:
            self.get(next(iter(self._pending)))

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of arrays in main memory."""
        return self._bytes

    @property
    def spilled_count(self) -> int:
        """The number of devices with their memory in a file."""
        return len(self._spilled)

    def close(self) -> None:
        """Remove the spilled files now: later the folder may belong to another store that resumes the run.

        Pending outcomes are dropped too, since they refer to the simulation.
        """
        self._pending.clear()
        if self._folder_made:
            self._remove()

    # ---- trip durations

    def record_trip(self, device: int, seconds: float) -> None:
        """Record the seconds from trigger to upload of a trip."""
        count, total = self._trips.get(device, (0, 0.0))
        self._trips[device] = (count + 1, total + seconds)

    def mean_seconds(self, device: int) -> float | None:
        """Mean duration of the device's completed trips, or None before the first."""
        count, total = self._trips.get(device, (0, 0.0))
        return total / count if count else None

    # ---- checkpoint

    def state(self) -> dict[str, Any]:
        """Return everything as nested dicts of plain values and arrays, with no outcome pending.

        Spilled arrays stay on disk until the checkpoint is written.
        """
        for device in sorted(self._pending):
            self.get(device)
        memories = self._memory | {device: self._lazy_memory(device) for device in self._spilled}
        return {
            "memory": {str(device): memories[device] for device in sorted(memories)},
            "trips": {str(device): list(trips) for device, trips in sorted(self._trips.items())},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load a saved state into an empty store. Arrays are copied one device at a time."""
        for device, memory in state["memory"].items():
            self.put(int(device), copy_arrays(memory))
        self._trips = {int(device): (int(count), float(total)) for device, (count, total) in state["trips"].items()}

    # ---- files

    def _spill(self) -> None:
        """Move the least recently used memories to files until the rest fits."""
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
        with writing(path, "fix this, then resume the run"), path.open("wb") as file:
            file.writelines(serialise(arrays, {"memory": json.dumps(plain)}))

    def _load(self, device: int) -> Memory:
        with self._path(device).open("rb") as file:
            return self._rebuild(file, {name: np.array(view) for name, view in views(file).items()})

    def _lazy_memory(self, device: int) -> Memory:
        """A spilled memory with its arrays left on disk."""
        path = self._path(device)

        def load(name: str) -> Callable[[], NDArray[Any]]:
            def one() -> NDArray[Any]:
                with path.open("rb") as file:
                    return np.array(views(file)[name])

            return one

        with path.open("rb") as file:
            stored, _ = contents(file)
            return self._rebuild(file, {name: LazyArray(a.shape, a.dtype, load(name)) for name, a in stored.items()})

    @staticmethod
    def _rebuild(file: BinaryIO, arrays: Mapping[str, Any]) -> Memory:
        """Rebuild a spilled memory from ``arrays``."""
        _, notes = contents(file)
        memory: Memory = unpack(json.loads(notes["memory"]), arrays)
        return memory

    def _path(self, device: int) -> Path:
        if not self._folder_made:
            shutil.rmtree(self._folder, ignore_errors=True)  # a symbolic link stays, and mkdir rejects it
            with writing(self._folder, "remove it, then resume the run"):
                self._folder.mkdir(parents=True)
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._folder_made = True
        return self._folder / f"device-{device}.safetensors"


def array_bytes(memory: Memory) -> int:
    """Bytes of the arrays in a memory."""
    return sum(value.nbytes for value in memory.values() if isinstance(value, np.ndarray))
