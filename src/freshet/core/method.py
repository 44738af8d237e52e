"""What a federated method is: a server rule (``Method``) and a device rule (``LocalRule``).

A new method is one file in ``freshet/methods`` with a subclass of ``Method``; see CONTRIBUTING.md.

Turning a validation error into one sentence that names the key and what is allowed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.config import JsonDict

from freshet.core.about import About
from freshet.core.events import NO_NUMBERS, Contribution, Event, Noted, Numbers
from freshet.core.layout import Layout
from freshet.core.messages import NO_VECTORS, Assignment, Fresh, Number, Slot, Upload, Vectors
from freshet.core.vectors import Vector
from freshet.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from freshet.core.server import ActiveTrip, Server


#: What a device remembers between its trips: numbers and arrays by name.
Memory = dict[str, Any]
#: ``{(option, value): {other option: its default}}``.
ConditionalDefaults = Mapping[tuple[str, str], Mapping[str, Any]]
#: Said at a field that decides none of a run's bits: where it finds data, where it trains, how often it is saved, what
#: its accuracy is held against. Any other field does decide, and two runs that differ in it are different runs.
NON_SEMANTIC: JsonDict = {"decides": False}


class Options(BaseModel):
    """Base of a method's hyper-parameters: typed, checked, frozen; an unknown key is an error."""

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


@dataclass(frozen=True)
class MethodContext:
    """What a method may know of the federation it runs in."""

    devices: int
    samples: NDArray[np.int64]
    epochs: int
    per_round: int
    layout: Layout
    seed: int
    #: Local epochs of each device, where they differ.
    own_epochs: NDArray[np.int64] | None = None
    #: Uploads to expect in the whole run (0: not known).
    expected_uploads: int = 0
    #: Seconds from trigger to upload of the fastest device (0: not known).
    fastest_seconds: float = 0.0
    #: Uploads that may be under way at once (0: not known).
    in_flight: int = 0
    #: How far n local steps along a constant unit gradient lead, in units of the learning rate; n for plain SGD.
    reach: Callable[[int], float] = float

    @property
    def most_epochs(self) -> int:
        """Local epochs that a trip can have: the usual ones, or more where some device has more of its own."""
        return self.epochs if self.own_epochs is None else max(self.epochs, int(self.own_epochs.max()))


class Facts(NamedTuple):
    """What a method's options can be held against before a run is built."""

    devices: int
    epochs: int
    per_round: int
    in_flight: int


class Aggregate(NamedTuple):
    """The upload (or the collected uploads) changed the global model; ``numbers`` holds all else that decided it.

    Without contributions the model must stay as it is (a round that lost everybody). ``length`` is how far the
    learnable weights moved, where the method knows it; the server measures it otherwise.
    """

    weights: Vector
    contributions: Sequence[Contribution] = ()
    numbers: Numbers = NO_NUMBERS
    length: float | None = None
    notes: tuple[Noted, ...] = ()


class Discard(NamedTuple):
    """The upload is dropped and changes nothing."""

    reason: str


class Reject(NamedTuple):
    """The upload would ruin the model; the method has gone back to where it was before."""

    reason: str


class Wait(NamedTuple):
    """The upload is kept for a later aggregation; ``urgent`` devices should upload at their next epoch end."""

    urgent: tuple[int, ...] = ()


Verdict = Aggregate | Discard | Reject | Wait


class TaskLoss(Protocol):
    """The task, as far as a device rule needs it."""

    def mean_loss(self, output: "Tensor", y: "Tensor") -> "Tensor": ...


class Local(Protocol):
    """One local training under way, as a device rule sees it (implemented by ``freshet.training.trainer``)."""

    model: "nn.Module"
    task: TaskLoss
    weights: "Tensor"
    gradient: "Tensor"
    base: "Tensor"
    layout: Layout
    learnable: int
    steps: int
    assignment: Assignment
    slot: Slot | None
    memory: Memory
    report: dict[str, Number]
    merged: dict[str, Number]
    vectors: dict[str, Vector]
    scratch: dict[str, Any]

    @property
    def seconds(self) -> float | None:
        """Mean duration of the device's completed trips, in seconds from trigger to upload; None before the first.
        Only for rules that are ``timed``."""

    def tensor(self, array: Vector) -> "Tensor": ...

    def snapshot(self) -> Vector: ...

    def set_weights(self, weights: Vector) -> None: ...

    def loss_at(self, x: "Tensor", y: "Tensor") -> float: ...

    def gradient_at(self, x: "Tensor", y: "Tensor") -> tuple[float, Vector]: ...

    def next_batch(self) -> tuple["Tensor", "Tensor"]: ...

    def held_out(self) -> tuple["Tensor", "Tensor"]: ...

    def frozen_features(self, weights: Vector) -> "Callable[[Tensor], Tensor]":
        """``features`` of another model of the same shape, in evaluation mode and without gradient."""


def overrides(cls: type, base: type, name: str) -> bool:
    """Whether a class has a function of its own where its base has one that does nothing."""
    own, plain = getattr(cls, name), getattr(base, name)
    return getattr(own, "__func__", own) is not getattr(plain, "__func__", plain)


class LocalRule:
    """Plain local SGD. A method's device rule overrides what it changes; instances are small, immutable, picklable."""

    #: Whether it has an ``adjust`` or a ``plan``: seen from the class, not declared.
    adjusts_gradient: ClassVar[bool] = False
    asks: ClassVar[bool] = False
    #: Vectors, each as long as the learnable weights, that go up with the model (``local.vectors``).
    sends: ClassVar[tuple[str, ...]] = ()
    #: True when a trip changes ``memory``, so that even a trip whose upload is lost has to be computed.
    remembers: ClassVar[bool] = False
    #: True when the rule reads ``local.seconds``.
    timed: ClassVar[bool] = False
    #: True when weight decay is part of the gradient that ``adjust`` sees, not added to what it leaves.
    decay_first: ClassVar[bool] = False
    #: Names in ``report`` and in the numbers of a merge that do not depend on the device's samples.
    public: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.adjusts_gradient = overrides(cls, LocalRule, "adjust")
        cls.asks = overrides(cls, LocalRule, "plan")

    def check(self, module: "nn.Module") -> None:
        """Raise a ``ConfigError`` if this rule cannot train such a module."""

    @property
    def holds_out(self) -> bool:
        """Whether the device keeps some samples apart, which it never trains on, for ``local.held_out``."""
        return False

    def leak(self) -> str | None:
        """What leaves a device beside its model and depends on its samples, so that noise on the model does not cover
        it; None where there is no such thing."""
        if self.sends:
            return f"it sends {', '.join(self.sends)} beside the model"
        return "when it asks for the fresh model may depend on the samples" if self.asks else None

    def plan(self, memory: Memory, assignment: Assignment, rng: np.random.Generator) -> Slot | None:
        """When to ask for the fresh model in this trip, or None for never; ``rng`` is the trip's own, in this call."""
        return None

    def begin(self, local: Local) -> None:
        """Called once before the first epoch."""

    def loss(self, local: Local, x: "Tensor", y: "Tensor") -> "Tensor":
        """The mini-batch loss to differentiate."""
        return local.task.mean_loss(local.model(x), y)

    def adjust(self, local: Local) -> None:
        """Add terms to ``local.gradient`` in place, before weight decay (unless ``decay_first``) and momentum."""

    def merge(self, local: Local, fresh: Fresh) -> dict[str, Number]:
        """Merge the fresh global model into the local one; returns the numbers that go up and into the log."""
        return {}

    def finish(self, local: Local) -> None:
        """Called once after the last epoch; may change ``local.memory``, ``local.report`` and ``local.vectors``."""


class Method:
    """The server's rule of a method, with its hyper-parameters and its state."""

    #: The header. A class with one of its own is a method; one without is a part of others.
    about: ClassVar[About]
    Options: ClassVar[type[Options]] = Options

    #: All that changes while the method runs, as one dataclass: it is saved and resumed by its annotations.
    state: Any = None

    def __init__(self, options: Any, context: MethodContext) -> None:
        self.options = options
        self.context = context

    @classmethod
    def marks(cls) -> dict[str, str]:
        """What must be said of the method wherever its results stand: marks, and the sentence behind each."""
        return cls.about.marks()

    @classmethod
    def check(cls, options: Any, facts: Facts) -> None:
        """Raise a ``ConfigError`` for options that are fine by themselves but do not go with the rest of the run."""

    @classmethod
    def rule(cls, options: Any) -> LocalRule:
        """The device's part."""
        return LocalRule()

    def epochs(self, server: "Server", device: int) -> int:
        """Local epochs for the trip that is about to start."""
        own = self.context.own_epochs
        return self.context.epochs if own is None else int(own[device])

    def instruct(self, server: "Server", device: int) -> dict[str, Number]:
        """Numbers that go down to the device with the model."""
        return {}

    def vectors(self, server: "Server", device: int) -> Vectors:
        """Vectors by name that go down to the device with the model."""
        return NO_VECTORS

    def discard_early(self, server: "Server", flight: "ActiveTrip") -> Discard | None:
        """A reason to discard the upload of this flight whatever it contains (it need not even be computed)."""
        return None

    def validate_report(self, upload: Upload, flight: "ActiveTrip") -> str | None:
        """A reason to reject what the device reports, or None; the report comes from outside and is not trusted."""
        return None

    def receive(self, server: "Server", upload: Upload, flight: "ActiveTrip") -> Verdict:
        """An upload that passed the gates has arrived."""
        raise NotImplementedError(f"{type(self).__name__} has no receive()")

    def finish_round(self, server: "Server") -> Verdict | None:
        """Synchronous methods: every selected device has uploaded or is lost."""
        return None

    def forget(self, server: "Server", device: int) -> Verdict | None:
        """A device in flight is lost; a buffering method may now have all it waits for."""
        return None

    def evaluation_model(self, server: "Server") -> Vector:
        """The model that is tested and handed to the user (usually what is sent down)."""
        return server.weights

    def notices(self) -> list[str]:
        """Sentences that a user should read before the run."""
        return []

    def summary(self) -> dict[str, Any]:
        """Numbers of the method's own for the summary."""
        return {}

    @classmethod
    def audit(cls, options: Any, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check one logged event against the formulas with ``core.expecting.expect``; ``memory`` lives as long as the
        replay of one log."""


def first_problem(section: str, error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """The first problem of a section as a ``ConfigError``."""
    problem = error.errors()[0]
    field = str(problem["loc"][0]) if problem["loc"] else ""
    key = f"{section}.{field}" if field else section
    if problem["type"] == "extra_forbidden":
        close = get_close_matches(field, model.model_fields, n=1)
        known = ", ".join(model.model_fields) or "none, there is nothing to choose here"
        hint = f"did you mean {section}.{close[0]}?" if close else f"known keys: {known}"
        return ConfigError(key, f"is not a known key; {hint}")
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return ConfigError(key, f"{message}, but {problem['input']!r} was given")
