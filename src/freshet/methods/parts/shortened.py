"""What server and device both add up, where a defence lets in only a share of an upload.

SCAFFOLD's c is the mean of its devices' c_i, and FedDyn's G that of their lambda_k, since both sides add the same
changes. A server that took in ``share`` of a change (``core.defence``) says so at the device's next trip, and the
device takes the rest back. Of what was let in whole nothing is said.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from freshet.core.messages import NOTHING, Number
from freshet.core.method import Memory
from freshet.methods.parts.rounds import Member


class Shortened(NamedTuple):
    """The last upload of a device that was shortened: its trip, and the share of it that is in the server's sum."""

    trip: int
    share: float


def noted(known: Mapping[int, Shortened], members: Iterable[Member]) -> dict[int, Shortened]:
    """Those known, and those of this round, by device."""
    return {**known, **{m.device: Shortened(m.trip, m.share) for m in members if m.share != 1.0}}


def told(known: Mapping[int, Shortened], device: int) -> Mapping[str, Number]:
    """What goes down to the device."""
    last = known.get(device)
    return NOTHING if last is None else {"shortened": last.trip, "share": last.share}


def share_taken(instruction: Mapping[str, Number], memory: Memory) -> float:
    """The device's side: how much the server took of the change that ``memory["trip"]`` made, if it took it at all."""
    is_meant = "share" in instruction and instruction["shortened"] == memory.get("trip")
    return float(instruction["share"]) if is_meant else 1.0
