"""The global models that somebody still needs: the current one and those that devices in flight started from."""

from dataclasses import dataclass

from freshet.core.vectors import Vector


@dataclass(slots=True)
class StoredVersion:
    """One stored version and the number of trips that hold it."""

    weights: Vector
    holders: int = 0


class VersionStore:
    """Models by version number, counted by reference: a past version is dropped when its last holder is done.

    The first model has version 1 and every accepted aggregation adds 1. A stored vector is never changed.
    """

    def __init__(self, weights: Vector, version: int = 1) -> None:
        self.current = version
        #: The current global model.
        self.weights = weights
        self._held = {version: StoredVersion(weights)}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, version: int) -> bool:
        return version in self._held

    def get(self, version: int) -> Vector:
        """The weights of a version that is current or held."""
        return self._held[version].weights

    def hold(self, version: int, times: int = 1) -> Vector:
        """Keep a version until the matching ``release``, or so many of them."""
        held = self._held[version]
        held.holders += times
        return held.weights

    def release(self, version: int) -> None:
        """Give one hold back; the model is dropped when nobody needs it any more."""
        held = self._held[version]
        if held.holders == 0:
            raise ValueError(f"version {version} is released more often than it was held")
        held.holders -= 1
        if held.holders == 0 and version != self.current:
            del self._held[version]

    def advance(self, weights: Vector) -> int:
        """Make ``weights`` the current model; returns its version number."""
        old = self.current
        self.current, self.weights = old + 1, weights
        self._held[old + 1] = StoredVersion(weights)
        if self._held[old].holders == 0:
            del self._held[old]
        return old + 1

    def items(self) -> list[tuple[int, Vector, int]]:
        """(version, weights, holders) of all that is stored, for a checkpoint."""
        return [(version, held.weights, held.holders) for version, held in sorted(self._held.items())]

    @staticmethod
    def restore(items: list[tuple[int, Vector, int]], current: int) -> "VersionStore":
        """The inverse of ``items``."""
        held = {version: StoredVersion(weights, holders) for version, weights, holders in items}
        store = VersionStore(held[current].weights, current)
        store._held = held
        return store
