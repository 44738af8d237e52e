"""FedFa: the global model is the mean of the last K uploaded models.

H. Xu, Z. Zhang, S. Di, B. Liu, K. Alharthi, J. Cao, "FedFa: A Fully Asynchronous Training Paradigm for Federated
Learning", IJCAI 2024. (Not the FedFA of other authors.)

An arrival u enters a queue of K models, and the oldest leaves it::

    w = 1/K sum_queue u            once it is full:   w <- w + (u_new - u_oldest) / K

Until the queue has K models, the server waits and the model stays. Neither staleness nor samples count, and a device
may fill several places.

Decisions [D]: this is the paper's variant on parameters. Its variant on differences is left out, since we could not
read its formula. K = 10 is that of a public implementation. A first step that is not finite drops the queue. Buffers
of the network are averaged in the same way.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from freshet.core.about import About, UploadCount
from freshet.core.admission import overflows
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Method, MethodContext, Mismatch, Options, Reject, Verdict, Wait, expect
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, combine, distance


class FedFaOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    K: int = Field(10, ge=1, description="models in the queue")


@dataclass(frozen=True)
class QueuedModel:
    """An uploaded model in the queue."""

    device: int
    base: int
    weights: Vector


@dataclass
class FedFaState:
    """The queue, oldest first."""

    queue: list[QueuedModel] = field(default_factory=list)


class FedFa(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "fedfa",
        "async",
        "FedFa",
        "Xu et al., FedFa, IJCAI 2024",
        space={"K": UploadCount(2, 20, whole=True)},
    )
    Options: ClassVar[type[Options]] = FedFaOptions
    options: FedFaOptions
    state: FedFaState

    def __init__(self, options: FedFaOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = FedFaState()

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        before, K = self.state.queue, self.options.K
        queue = [*before, QueuedModel(upload.device, trip.base, upload.weights)][-K:]
        if len(queue) < K:
            self.state.queue = queue
            return Wait()
        n, is_first = self.context.layout.learnable, len(before) < K
        new = combine([(1.0 / K, queued.weights) for queued in queue])
        self.context.layout.max_counters(new, *(queued.weights for queued in queue))
        length = distance(new[:n], server.weights[:n])
        if overflows(new, length):
            self.state.queue = [] if is_first else before
            return Reject(NOT_FINITE)
        self.state.queue = queue
        fresh = queue if is_first else queue[-1:]
        parts = [Contribution(q.device, q.base, server.version - q.base + 1, 1.0 / K) for q in fresh]
        return Aggregate(new, parts, {"alpha": 1.0 / K, "queued": [q.device for q in queue]}, length)

    @classmethod
    def audit(cls, options: FedFaOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check the queue: K models first, then one more at every step, and the oldest gone."""
        if not isinstance(event, Aggregated):
            return
        queue, parts = memory.setdefault("queue", []), event.contributions
        if len(parts) != (1 if queue else options.K):
            raise Mismatch(f"{len(parts)} new uploads are in the queue's mean of K = {options.K}")
        for part in parts:
            expect(f"weight of device {part.device}", part.weight, 1.0 / options.K)
        expect("alpha", event.numbers["alpha"], 1.0 / options.K)
        memory["queue"] = [*queue, *(part.device for part in parts)][-options.K :]
        if event.numbers["queued"] != memory["queue"]:
            raise Mismatch(f"queued is {event.numbers['queued']}, the uploads give {memory['queue']}")
