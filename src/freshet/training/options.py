"""Settings of local training."""

import os
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from freshet.core.method import ADDED, Options

#: What float32 holds; and numbers whose product it still holds, for optimisers that multiply them.
MAX_FLOAT32, MAX_FACTOR = 3.4e38, 1e15


class TrainingOptions(Options):
    """Local training on a device."""

    task: Literal["classification", "binary", "multilabel", "regression", "tokens", "custom"] = Field(
        "classification", description="what the outputs are for: loss and metrics (or a Task of your own)"
    )
    epochs: int = Field(5, ge=1, description="local epochs per trip (the paper's L)")
    batch_size: int = Field(10, ge=1, description="samples per step; the last, smaller batch is kept")
    lr: float = Field(0.1, gt=0, description="learning rate at the start")
    lr_decay: float = Field(
        0.999, gt=0, le=1, description="factor on the learning rate per round, or its worth in uploads"
    )
    schedule: Literal["exponential", "constant", "step", "cosine", "custom"] = Field(
        "exponential",
        description="the learning rate over rounds: lr_decay at each, none, lr_decay every schedule_every, half a "
        "cosine down to 1 % at the end (or a function of (lr, rounds))",
    )
    schedule_every: int = Field(30, ge=1, description="rounds between two steps of the schedule step")
    schedule_rounds: int | None = Field(
        None,
        ge=1,
        description="rounds of the schedule cosine (default: those of the run's first end, written here by it)",
    )
    steps: int = Field(
        0,
        ge=0,
        description="local steps per trip, in training.epochs equal parts, whatever the samples (0: whole epochs)",
    )
    local_epochs: list[int] = Field(
        [], description="[least, most]: every device has its own number of local epochs, drawn once (empty: epochs)"
    )
    clip: float = Field(0.0, ge=0, description="longest gradient of a step; a longer one is shortened to it (0: none)")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="where the model lives while it trains")
    fast: bool = Field(
        True,
        description="train with fused and compiled layers on the CPU; false takes torch's own, and weights differ in "
        "their last bits (FRESHET_FAST=0 makes false the default)",
        json_schema_extra=ADDED,
    )
    augment: bool = Field(False, description="random crop and flip of training images")
    optimiser: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="how a step follows from a gradient; every trip starts with a new one"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    nesterov: bool = Field(False, description="Nesterov's form of the momentum")
    weight_decay: float = Field(0.0, ge=0, description="weight decay, part of the gradient (adamw: apart from it)")

    @field_validator("lr", "weight_decay")
    @classmethod
    def _check_bound(cls, value: float, info: ValidationInfo) -> float:
        most = MAX_FLOAT32 if info.data.get("optimiser", "sgd") == "sgd" else MAX_FACTOR
        if value > most:
            raise ValueError(f"must be at most {most:g}")
        return value

    @field_validator("optimiser")
    @classmethod
    def _check_optimiser(cls, value: str, info: ValidationInfo) -> str:
        if value != "sgd" and info.data.get("lr", 0.0) > MAX_FACTOR:
            raise ValueError(f"only sgd takes a training.lr above {MAX_FACTOR:g}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _check_momentum(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if given.get("optimiser", "sgd") != "sgd" and (given.get("momentum") or given.get("nesterov")):
            raise ValueError('momentum and nesterov are for optimiser = "sgd"; leave them out')
        if given.get("nesterov") is True and not given.get("momentum"):
            raise ValueError("nesterov needs a momentum above 0")
        return given

    @model_validator(mode="before")
    @classmethod
    def _fast_by_default(cls, given: Any) -> Any:
        if isinstance(given, dict) and os.environ.get("FRESHET_FAST") == "0":
            return {"fast": False} | given
        return given

    @model_validator(mode="after")
    def _check_epochs(self) -> Self:
        if 0 < self.steps < self.epochs:
            raise ValueError(
                f"steps = {self.steps} cannot be dealt to {self.epochs} epochs; lower epochs or raise steps"
            )
        span = self.local_epochs
        if span and not (len(span) == 2 and 1 <= span[0] <= span[1]):
            raise ValueError(f"local_epochs must be [least, most] with 1 <= least <= most, not {span}")
        if span and self.steps:
            raise ValueError("steps and local_epochs exclude each other; leave one out")
        return self
