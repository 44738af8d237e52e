"""FedAvg: the mean of the selected devices' models, weighted by their numbers of samples.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017.

``w^{t+1} = sum_{k in S_t} (n_k / m_t) u_k`` with ``m_t = sum_{k in S_t} n_k``: normalised over the selected
devices only, evaluated in ascending order of device. An empty round counts and leaves the model unchanged.
"""

from typing import Any

from freshet.core.about import About
from freshet.core.events import Event
from freshet.methods._shared.rounds import RoundMethod, audit_sample_shares


class FedAvg(RoundMethod):
    """The plain mean; devices do plain SGD."""

    about = About("fedavg", "sync", "FedAvg", "McMahan et al., AISTATS 2017")

    @classmethod
    def audit(cls, options: Any, event: Event, time: float, memory: dict[Any, Any]) -> None:
        audit_sample_shares(event)
