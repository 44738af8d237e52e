"""A complete foreign method in one file, unknown to Freshet.

Every device has a trust p, initially p0, that grows with each upload: ``p <- p + rate (1 - p)``. An upload of staleness
tau = s - 1 is mixed in with ``alpha = p (1 + tau)^-a``.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from freshet import About, ConfigError, Method
from freshet import Options as BaseOptions
from freshet.core.about import Curve, Range, UploadCount
from freshet.core.events import Aggregated, Event
from freshet.core.method import Discard, Facts, expect
from freshet.methods._shared.asynchronous import mix_upload, polynomial_discount


class TrustOptions(BaseOptions):
    """Hyper-parameters."""

    p0: float = Field(0.4, gt=0, le=1, description="trust in a device without uploads")
    rate: float = Field(0.2, ge=0, le=1, description="growth rate of the trust")
    a: float = Field(0.5, ge=0, description="exponent of the staleness discount")
    warm_up: int = Field(2, ge=0, description="uploads that are only counted")

    def check_run(self, facts: Facts) -> None:
        if self.warm_up > 10 * facts.devices:
            raise ConfigError("method.warm_up", f"must be at most 10 fleet.devices = {10 * facts.devices}")


@dataclass
class Heard:
    """The server's state."""

    uploads: int = 0
    trust: dict[int, float] = field(default_factory=dict)


class Trust(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "trust",
        "async",
        "Trust",
        "Somebody, somewhere, 2025",
        space={"p0": Range(0.1, 1.0, log=True), "a": Range(0.0, 1.5), "warm_up": UploadCount(0, 6, whole=True)},
        curves=(Curve("trust", "aggregate", "p", "π", "server, trust <in> a device"),),
    )
    Options: ClassVar[type[BaseOptions]] = TrustOptions

    def __init__(self, options: TrustOptions, context: Any) -> None:
        super().__init__(options, context)
        self.state = Heard()

    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        o, s, heard = self.options, server.staleness(trip), self.state
        heard.uploads += 1
        if heard.uploads <= o.warm_up:
            return Discard("warming up")
        p = heard.trust.get(upload.device, o.p0)
        heard.trust[upload.device] = p + o.rate * (1.0 - p)
        return mix_upload(server, upload, trip, p * polynomial_discount(s - 1, o.a), p=p)

    @classmethod
    def audit(cls, options: TrustOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        if isinstance(event, Aggregated):
            (part,) = event.contributions
            p = memory.get(part.device, options.p0)
            expect("p", event.numbers["p"], p)
            expect("alpha", part.weight, p * polynomial_discount(part.staleness - 1, options.a))
            memory[part.device] = p + options.rate * (1.0 - p)


class Nameless(Method):
    """Has no header."""


class Rounded(Trust):
    """Inherits Trust's header: runs by its path, never listed."""


class Astray(Method):
    """Its tuning space names an option that does not exist."""

    about = About("astray", "async", "Astray", "-", space={"mu": Range(0.0, 1.0)})
