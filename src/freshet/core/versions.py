"""The global models that are still needed: the current one and those that trips in flight started from."""

from dataclasses import dataclass

from freshet.core.vectors import Vector


@dataclass(slots=True)
class StoredVersion:
    """One stored version and the number of trips that hold it."""

    weights: Vector
    holders: int = 0


class VersionStore:
    """Models by version number with reference counts. An old version is dropped when its last holder releases it.

    The first model has version 1. Every aggregation adds 1. A stored vector never changes.
    """

    def __init__(self, weights: Vector, version: int = 1) -> None:
        self.current = version
        #: The current global model.
        self.weights = weights
        self._stored = {version: StoredVersion(weights)}

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, version: int) -> bool:
        return version in self._stored

    def get(self, version: int) -> Vector:
        """The weights of a version that is current or held."""
        return self._stored[version].weights

    def hold(self, version: int, times: int = 1) -> Vector:
        """Keep a version until ``release`` is called ``times`` times."""
        stored = self._stored[version]
        stored.holders += times
        return stored.weights

    def release(self, version: int) -> None:
        """Release one hold. An old model is dropped with its last hold."""
        stored = self._stored[version]
        if stored.holders == 0:
            raise ValueError(f"version {version} is released more often than it was held")
        stored.holders -= 1
        if stored.holders == 0 and version != self.current:
            del self._stored[version]

    def advance(self, weights: Vector) -> int:
        """Make ``weights`` the current model. Returns its version number."""
        old = self.current
        self.current, self.weights = old + 1, weights
        self._stored[old + 1] = StoredVersion(weights)
        if self._stored[old].holders == 0:
            del self._stored[old]
        return old + 1

    def items(self) -> list[tuple[int, Vector, int]]:
        """(version, weights, holders) of all stored models, for a checkpoint."""
        return [(version, stored.weights, stored.holders) for version, stored in sorted(self._stored.items())]

    @staticmethod
    def restore(items: list[tuple[int, Vector, int]], current: int) -> "VersionStore":
        """The inverse of ``items``."""
        stored = {version: StoredVersion(weights, holders) for version, weights, holders in items}
        store = VersionStore(stored[current].weights, current)
        store._stored = stored
        return store
