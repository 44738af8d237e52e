"""A new method in one file: FedAsync's rule, but unusually long steps are shortened first.

freshet run -m examples/own_method.py:Bounded --until 3m
"""

from dataclasses import dataclass

from pydantic import Field

from freshet import About, Method, Options
from freshet.core.about import Range
from freshet.core.events import Aggregated, Contribution
from freshet.core.method import Aggregate, expect
from freshet.core.vectors import combine, distance


class BoundedOptions(Options):
    """Hyper-parameters; `freshet methods FILE:Bounded` lists them."""

    alpha: float = Field(0.6, gt=0, le=1, description="weight of a fresh upload")
    bound: float = Field(2.0, gt=0, description="longest step, as a multiple of the usual length")


@dataclass
class UsualLength:
    """The server's state. Checkpoints save and restore it."""

    length: float = 0.0


class Bounded(Method):
    """``w <- w + a c (u - w)`` with ``a = alpha / sqrt(s)``, c < 1 if ``|u - w|`` exceeds bound times the usual."""

    about = About("bounded", "async", "Bounded", "this file", space={"alpha": Range(0.1, 1.0)})
    Options = BoundedOptions

    def __init__(self, options, context):
        super().__init__(options, context)
        self.state = UsualLength()

    def receive(self, server, upload, trip):
        s, w, u = server.staleness(trip), server.weights, upload.weights
        length, usual = distance(u, w), self.state.length
        limit = self.options.bound * usual if usual else length
        weight = self.options.alpha / s**0.5 * min(1.0, limit / length if length else 1.0)
        self.state.length = 0.9 * usual + 0.1 * length if usual else length
        new = combine([(1 - weight, w), (weight, u)])
        self.context.layout.max_counters(new, w, u)  # BatchNorm counts its batches
        part = Contribution(upload.device, trip.base, s, weight)
        return Aggregate(new, [part], {"length": length, "limit": limit})

    @classmethod
    def audit(cls, options, event, time, memory):
        if isinstance(event, Aggregated):
            (part,), length = event.contributions, event.numbers["length"]
            usual = memory.get("usual", 0.0)
            limit = options.bound * usual if usual else length
            expect("limit", event.numbers["limit"], limit)
            scale = min(1.0, limit / length if length else 1.0)
            expect("weight", part.weight, options.alpha / part.staleness**0.5 * scale)
            memory["usual"] = 0.9 * usual + 0.1 * length if usual else length


if __name__ == "__main__":
    import os

    import freshet
    from freshet.runs.audit import audit
    from freshet.runs.reader import RunDirectory

    method = f"{__file__}:Bounded"
    result = freshet.Federation(method=method, seed=1).run("40s" if os.environ.get("FRESHET_SHORT") else "5m")
    audited = audit(RunDirectory(result.directory), method)
    print(
        f"accuracy {result.accuracy[-1]:.2f}; audited {audited.aggregations} weights: {audited.problem or 'all add up'}"
    )
