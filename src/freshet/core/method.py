"""What a federated method is: a server rule (``Method``), a device rule (``LocalRule``) and hyper-parameters.

A new method is one file in ``freshet/methods`` with a subclass of ``Method``; see CONTRIBUTING.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.config import JsonDict

from freshet.core.about import About
from freshet.core.events import NO_NUMBERS, Contribution, Event, Merged, Noted, Numbers
from freshet.core.layout import Layout
from freshet.core.messages import NO_VECTORS, Assignment, Fresh, Merge, Number, Slot, Upload, Vectors
from freshet.core.scheduling import View
from freshet.core.vectors import Vector
from freshet.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from freshet.core.server import ActiveTrip, Server


class Mismatch(Exception):
    """A logged number does not follow from the others. The text says which."""


def expect(name: str, logged: float, recomputed: float, tolerance: float = 1e-9) -> None:
    """Raise ``Mismatch`` unless the two agree to rounding."""
    if logged != recomputed and not math.isclose(logged, recomputed, rel_tol=tolerance, abs_tol=1e-15):
        raise Mismatch(f"{name} is logged as {logged!r}, the formula gives {recomputed!r}")


#: What a device remembers between its trips: numbers and arrays by name.
Memory = dict[str, Any]
#: The key of a device's memory for the parts of the model that stay on it (``model.local``).
OWN_PARTS = "own parts"
#: ``{(option, value): {other option: its default}}``.
ConditionalDefaults = Mapping[tuple[str, str], Mapping[str, Any]]
#: Marks a field that does not affect a run's bits, such as where data are stored or how often a checkpoint is written.
#: Two runs that differ in any other field are different runs.
NON_SEMANTIC: JsonDict = {"decides": False}
#: Declares that older runs lack a field. What they did must be its default, for good: hashes of older runs stay valid.
ADDED: JsonDict = {"added": True}


class Options(BaseModel):
    """Base of a method's hyper-parameters: typed, validated and frozen. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    #: Defaults that depend on the value of another option.
    conditional_defaults: ClassVar[ConditionalDefaults] = {}

    @model_validator(mode="before")
    @classmethod
    def _apply_conditional_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        applicable: dict[str, Any] = {}
        for (key, value), defaults in cls.conditional_defaults.items():
            applicable |= defaults if given.get(key) == value else {}
        return applicable | given

    def with_derived(self, context: "MethodContext") -> Self:
        """Fill in the options that follow from the run. They are written to its config.toml."""
        return self

    def check_run(self, facts: "Facts") -> None:
        """Raise a ``ConfigError`` for valid options that conflict with the rest of the run."""


@dataclass(frozen=True)
class MethodContext:
    """What a method may know about the federation it runs in."""

    devices: int
    samples: NDArray[np.int64]
    epochs: int
    per_round: int
    layout: Layout
    seed: int
    #: Local epochs of each device, if they differ.
    own_epochs: NDArray[np.int64] | None = None
    #: Uploads expected in the whole run (0: unknown).
    expected_uploads: int = 0
    #: Seconds from trigger to upload of the fastest device (0: unknown).
    fastest_seconds: float = 0.0
    #: Expected seconds from trigger to upload of each device, for the common number of epochs; None in a deployment.
    seconds: NDArray[np.float64] | None = None
    #: The most uploads that are in flight at once (0: unknown).
    in_flight: int = 0
    #: Distance covered by n local steps along a constant unit gradient, in units of the learning rate: n for plain SGD.
    reach: Callable[[int], float] = float
    #: Whether devices report their numbers of samples, which may be wrong.
    samples_reported: bool = False
    #: The largest share of an aggregation that one device's samples may give it (None: see ``share_limit``).
    max_share: float | None = None

    def share_limit(self, members: int) -> float:
        """The largest share of one of ``members`` devices by its samples.

        If devices report their samples, that is half, or four times the mean share if this is less.
        """
        if self.max_share is not None:
            return self.max_share
        return min(0.5, 4.0 / members) if self.samples_reported and members > 1 else 1.0

    @property
    def most_epochs(self) -> int:
        """The most local epochs that a trip can have."""
        return self.epochs if self.own_epochs is None else max(self.epochs, int(self.own_epochs.max()))


class Facts(NamedTuple):
    """Settings of the run that a method's options are checked against."""

    devices: int
    epochs: int
    per_round: int
    in_flight: int


class Aggregate(NamedTuple):
    """The global model changes. ``numbers`` holds everything else that decided the new weights.

    Without contributions the model must stay the same (a round that lost every device). ``length`` is the distance that
    the learnable weights moved. The server measures it if it is None. The trips of the devices in ``cancel`` end here,
    without an upload.
    """

    weights: Vector
    contributions: Sequence[Contribution] = ()
    numbers: Numbers = NO_NUMBERS
    length: float | None = None
    notes: tuple[Noted, ...] = ()
    cancel: tuple[int, ...] = ()


class Discard(NamedTuple):
    """The method drops the upload. Nothing changes."""

    reason: str


class Reject(NamedTuple):
    """The upload would ruin the model. The method has restored its state from before."""

    reason: str


class Wait(NamedTuple):
    """The upload waits for a later aggregation. ``urgent`` devices should upload at the end of their epoch."""

    urgent: tuple[int, ...] = ()


Verdict = Aggregate | Discard | Reject | Wait


class TaskLoss(Protocol):
    """The part of a task that a device rule needs."""

    def mean_loss(self, output: Any, y: Any) -> "Tensor":
        """The loss of a model's output."""

    def batch_loss(self, model: "nn.Module", x: Any, y: Any) -> "Tensor":
        """The loss of a model on a batch. The task calls the model, since x may be a tensor, a tuple or a dict."""


class Moves(NamedTuple):
    """Which parameters a step moves: those that travel, and those that stay on the device (``model.local``)."""

    shared: bool = True
    own: bool = True


class Local(Protocol):
    """A trip as a device rule sees it (implemented by ``freshet.training.trip.LocalTrip``)."""

    model: "nn.Module"
    task: TaskLoss
    weights: "Tensor"
    gradient: "Tensor"
    base: "Tensor"
    layout: Layout
    learnable: int
    steps: int
    #: The current epoch, from 1, and the number of epochs of the trip.
    epoch: int
    epochs: int
    assignment: Assignment
    slot: Slot | None
    memory: Memory
    report: dict[str, Number]
    merges: list[Merge]
    #: For rules that are ``anchored``: the base, with every merge applied to it. ``w - anchor`` is the progress, and
    #: ``base`` is the learnable part of the anchor.
    anchor: Vector
    vectors: dict[str, Vector]
    scratch: dict[str, Any]

    @property
    def newest(self) -> int:
        """The newest version that the device has: its base or, after a merge, the fresh one."""

    @property
    def seconds(self) -> float | None:
        """Mean seconds from trigger to upload of the device's completed trips; None before the first.

        Only for rules that are ``timed``.
        """

    def tensor(self, array: Vector) -> "Tensor": ...

    def snapshot(self) -> Vector: ...

    def set_weights(self, weights: Vector) -> None: ...

    def loss_at(self, x: Any, y: Any) -> float: ...

    def gradient_at(self, x: Any, y: Any) -> tuple[float, Vector]: ...

    def next_batch(self) -> tuple[Any, Any]: ...

    def held_out(self) -> tuple[Any, Any]: ...

    def further_pass(self) -> Iterator[None]:
        """One more pass over the device's samples, with the gradient of each mini-batch's loss in ``gradient``."""

    def frozen_features(self, weights: Vector) -> "Callable[[Any], Tensor]":
        """The ``features`` function of another model of the same shape, in evaluation mode and without gradient."""


def overrides(cls: type, base: type, name: str) -> bool:
    """Whether a class overrides this method of its base."""
    own, plain = getattr(cls, name), getattr(base, name)
    return getattr(own, "__func__", own) is not getattr(plain, "__func__", plain)


class LocalRule:
    """Plain local SGD. A device rule overrides the parts that it changes.

    Instances are small, immutable and picklable.
    """

    #: Whether the class overrides ``adjust``. Set automatically.
    adjusts_gradient: ClassVar[bool] = False
    #: Whether the class overrides ``loss``. Set automatically.
    changes_loss: ClassVar[bool] = False
    #: Whether the class overrides ``plan``, so that devices may ask for a fresh model. Set automatically.
    asks: ClassVar[bool] = False
    #: Names of the vectors uploaded with the model (``local.vectors``). Each is as long as the learnable weights.
    sends: ClassVar[tuple[str, ...]] = ()
    #: True if a trip changes ``memory``, so that even a trip with a lost upload must be computed.
    remembers: ClassVar[bool] = False
    #: True if the rule reads ``local.seconds``.
    timed: ClassVar[bool] = False
    #: True if weight decay is added to the gradient before ``adjust``, not after it.
    decay_first: ClassVar[bool] = False
    #: True if a device uses another model than the server's: ``personal_model``.
    personalises: ClassVar[bool] = False
    #: True if the rule trains the parts that stay on the device apart, so that there must be some.
    needs_own_parts: ClassVar[bool] = False
    #: True if the server needs the loss of a trip (``LOSS_DECAY``), which only the built-in loop reports.
    reports_loss: ClassVar[bool] = False
    #: Names in ``report`` and in the numbers of a merge that do not depend on the device's samples.
    public: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.adjusts_gradient = overrides(cls, LocalRule, "adjust")
        cls.changes_loss = overrides(cls, LocalRule, "loss")
        cls.asks = overrides(cls, LocalRule, "plan")

    def check(self, module: "nn.Module") -> None:
        """Raise a ``ConfigError`` if this rule cannot train the module."""

    @property
    def holds_out(self) -> bool:
        """Whether the device sets some samples aside for ``local.held_out`` and never trains on them."""
        return False

    def leak(self) -> str | None:
        """Describe sample-dependent data sent outside the differential-privacy noise, or return None."""
        if self.sends:
            return f"it sends {', '.join(self.sends)} beside the model"
        return "when it asks for the fresh model may depend on the samples" if self.asks else None

    def plan(self, memory: Memory, assignment: Assignment, rng: np.random.Generator) -> Slot | None:
        """When to ask for the fresh model in this trip; None for never. ``rng`` is valid during this call only."""
        return None

    def later_slots(self, first: Slot, epochs: int) -> tuple[Slot, ...]:
        """Further requests of a trip whose first one is planned, in ascending order of their epochs."""
        return ()

    @property
    def anchored(self) -> bool:
        """Whether the rule needs ``local.anchor``. Then an upload is clipped and compressed as a difference to it."""
        return False

    @property
    def push_after(self) -> int:
        """How many versions ahead the server sends its model to a device in flight, unasked (0: never)."""
        return 0

    def begin(self, local: Local) -> None:
        """Called once before the first epoch."""

    def loss(self, local: Local, x: Any, y: Any) -> "Tensor":
        """The mini-batch loss to differentiate. Inputs and targets are tensors, or dicts or tuples of them."""
        return local.task.batch_loss(local.model, x, y)

    def adjust(self, local: Local) -> None:
        """Add terms to ``local.gradient`` in place, before weight decay (unless ``decay_first``) and momentum."""

    def moves(self, local: Local) -> Moves:
        """Which parameters the next step moves."""
        return Moves()

    def personal_model(self, memory: Memory, weights: Vector) -> Vector:
        """The model that a device with this memory uses itself, given the server's."""
        return weights

    def merge(self, local: Local, fresh: Fresh) -> dict[str, Number]:
        """Merge the fresh global model into the local one. Return the numbers to upload and log."""
        return {}

    def finish(self, local: Local) -> None:
        """Called once after the last epoch. May change ``local.memory``, ``local.report`` and ``local.vectors``."""

    def report_problem(self, upload: Upload) -> str | None:
        """A reason why this rule cannot have produced what the device reports, or None. The server calls it."""
        return None

    def audit_merge(self, event: Merged) -> None:
        """Check a logged merge against the rule's formulas with ``expect``."""


class Method:
    """The server rule of a method, with its hyper-parameters and its state."""

    #: The header. A class that defines one is a method. A class without one is a base for others.
    about: ClassVar[About]
    Options: ClassVar[type[Options]] = Options

    #: Everything that changes during the run, as one dataclass. Its annotations say how to save and restore it.
    state: Any = None

    def __init__(self, options: Any, context: MethodContext) -> None:
        self.options = options
        self.context = context

    @classmethod
    def marks(cls) -> dict[str, str]:
        """Marks to print beside the method's results, each with its explanation."""
        return cls.about.marks()

    @classmethod
    def rule(cls, options: Any) -> LocalRule:
        """The device rule."""
        return LocalRule()

    @classmethod
    def beyond_sum(cls, options: Any) -> str | None:
        """How uploads reach the model other than by a sum with public weights (``Server.release``), or None.

        Noise on the server (``[privacy] where = "server"``) covers nothing else.
        """
        return "it does not say that it uses uploads only in a sum with public weights"

    def epochs(self, server: "Server", device: int) -> int:
        """Local epochs of the trip that is about to start."""
        own = self.context.own_epochs
        return self.context.epochs if own is None else int(own[device])

    def instruct(self, server: "Server", device: int) -> dict[str, Number]:
        """Numbers sent to the device with the model."""
        return {}

    def vectors(self, server: "Server", device: int) -> Vectors:
        """Named vectors sent to the device with the model."""
        return NO_VECTORS

    def discard_early(self, server: "Server", trip: "ActiveTrip") -> Discard | None:
        """A reason to discard this trip's upload whatever it contains, or None. A simulator need not compute it."""
        return None

    def validate_report(self, upload: Upload, trip: "ActiveTrip") -> str | None:
        """A reason to reject what the device reports, or None. The report is not trusted."""
        return None

    def receive(self, server: "Server", upload: Upload, trip: "ActiveTrip") -> Verdict:
        """Decide on an upload that passed all checks."""
        raise NotImplementedError(f"{type(self).__name__} has no receive()")

    def finish_round(self, server: "Server") -> Verdict | None:
        """Close a round of a synchronous method: every selected device has uploaded or is lost."""
        return None

    def forget(self, server: "Server", device: int) -> Verdict | None:
        """A device in flight is lost. A buffering method may now have all the uploads that it waits for."""
        return None

    def timer(self, server: "Server") -> float | None:
        """When to call ``on_timer``, in seconds since the start of the run; None for never. Asked after every event."""
        return None

    def on_timer(self, server: "Server") -> Verdict | None:
        """The time of ``timer`` has come. Afterwards ``timer`` must name a later one, or none."""
        return None

    def select(self, view: View, count: int, candidates: list[int]) -> Sequence[int]:
        """Choose up to ``count`` of the candidates, in the order in which they start. It replaces ``run.selection``."""
        raise NotImplementedError(f"{type(self).__name__} has no select()")

    def evaluation_model(self, server: "Server") -> Vector:
        """The model that is tested and returned to the user: usually the one that devices get."""
        return server.weights

    def notices(self) -> list[str]:
        """Sentences to show the user before the run."""
        return []

    def summary(self) -> dict[str, Any]:
        """The method's entries in summary.json."""
        return {}

    @classmethod
    def audit(cls, options: Any, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check one logged event against the formulas with ``expect``.

        ``memory`` is kept for the replay of one log.
        """


#: Names of other systems, and what is meant here.
SYNONYMS = {
    **dict.fromkeys(("clients", "num_clients", "n_clients", "nodes", "num_partitions"), "fleet.devices"),
    **dict.fromkeys(("alpha", "dirichlet_alpha"), "data.concentration"),
    **dict.fromkeys(("learning_rate", "eta"), "training.lr"),
    **dict.fromkeys(("optimizer",), "training.optimiser"),
    **dict.fromkeys(("num_rounds", "comm_rounds", "global_rounds"), "run.rounds"),
    **dict.fromkeys(("num_epochs", "local_ep"), "training.epochs"),
    **dict.fromkeys(("batch", "bs", "local_bs"), "training.batch_size"),
    **dict.fromkeys(("clients_per_round", "num_clients_per_round", "sample_clients"), "run.per_round"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps", "micro_batch"),
        "training.micro_batch_size",
    ),
    **dict.fromkeys(("mixed_precision", "bf16", "amp", "autocast"), "training.precision"),
    **dict.fromkeys(("dataset",), "data.name"),
    **dict.fromkeys(("strategy", "algorithm"), "method.name"),
    **dict.fromkeys(("early_stopping",), "run.patience"),
}


def first_problem(section: str, error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """The first problem of a section as one sentence that names the key and what is allowed."""
    problem = error.errors()[0]
    field = str(problem["loc"][0]) if problem["loc"] else ""
    key = f"{section}.{field}" if field else section
    if problem["type"] == "extra_forbidden":
        close = get_close_matches(field, model.model_fields, n=1)
        known = ", ".join(model.model_fields) or "none"
        own = f"{section}.{close[0]}" if close else None
        meant = own if section == "method" and own else SYNONYMS.get(field, own)
        hint = f"did you mean {meant}?" if meant else f"known keys: {known}"
        return ConfigError(key, f"is not a known key; {hint}")
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return ConfigError(key, f"{message}, but {problem['input']!r} was given")
