"""FedSSMU: FedASMU's two ideas inside synchronous rounds.

J. Jia, J. Liu et al., "Efficient Federated Learning with Timely Update Dissemination".

In round g the server merges every upload at once into ``w_{g,k}``, where k counts the uploads merged before it in this
round. Its staleness is ``s = k + 1``, which is ``t - o + 1`` since each merge adds one version. The formulas are
FedASMU's with the round g under the root, in place of the version t and, on the device, of the fresh version;
``g - o + 1`` there is k + 1. The round ends when all selected devices have uploaded or are lost;
``w_{g+1,0} = w_{g,k}``.

With sigma = 1, iota = 0 and ``mu_alpha lambda / sqrt(g) = c``: ``alpha_k = c / (c + k + 1)``. With c = 1 the round's
result is the plain mean of the old model and all uploads.
"""

from typing import ClassVar

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, ConditionalDefaults, Options, Verdict
from freshet.core.server import ActiveTrip, Server
from freshet.methods.asmu.rule import SHAPED, ASMUOptions
from freshet.methods.fedasmu import FIXED_BETA, FedASMU


class SSMUOptions(ASMUOptions):
    """FedASMU's hyper-parameters with the defaults that suit rounds."""

    conditional_defaults: ClassVar[ConditionalDefaults] = {
        **ASMUOptions.conditional_defaults,
        ("apply", "progress"): {"lambda0": 0.3, "sigma0": 0.1, "iota0": 0.1, **SHAPED},
    }

    reference_span: ClassVar[int] = 10

    lambda0: float = Field(3.0, description="initial lambda: weight of the staleness term")
    sigma0: float = Field(0.8, description="initial sigma: how fast the weight falls with the place in the round")
    iota0: float = Field(0.05, description="initial iota: weight independent of the place in the round")


class FedSSMU(FedASMU):
    """FedASMU's server, with rounds in place of versions."""

    about = About(
        "fedssmu",
        "sync",
        "FedSSMU",
        "Jia, Liu et al., Efficient Federated Learning with Timely Update Dissemination",
        variants={
            "fedssmu-da": {"dynamic_server": False},
            "fedssmu-fa": {"adaptive_device": False},
            "fedssmu-0": {"dynamic_server": False, "adaptive_device": False},
            "fedssmu-published": {"equations": "published"},
            "fedssmu-progress": {"apply": "progress"},
            "fedssmu-course": {"apply": "progress", "controls": "course"},
            "fedssmu-fresh": {"apply": "progress", "controls": "course", "merge": "rebase"},
        },
        space=FedASMU.about.space,
        # Ten uploads of a round, each with an alpha of 0.1, add up to their mean.
        spaces={
            name: {"lambda0": Range(0.05, 2.0, log=True), "iota0": Range(0.02, 0.3), **fixed}
            for name, fixed in (("fedssmu-progress", {}), ("fedssmu-course", {}), ("fedssmu-fresh", FIXED_BETA))
        },
        curves=FedASMU.about.curves,
    )
    Options: ClassVar[type[Options]] = SSMUOptions

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        verdict = super().receive(server, upload, trip)
        if isinstance(verdict, Aggregate):
            return verdict._replace(numbers={**verdict.numbers, "k": server.version - trip.base})
        return verdict
