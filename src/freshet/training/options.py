"""Settings of local training."""

import os
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from freshet.core.method import ADDED, Options

#: The largest float32, and a bound on settings that Adam multiplies with each other.
MAX_FLOAT32, MAX_FACTOR = 3.4e38, 1e15


class TrainingOptions(Options):
    """Local training on a device."""

    trainer: Literal["built-in", "custom"] = Field(
        "built-in",
        description="what trains on a device: the built-in loop, or your own function (Federation(trainer=...))",
        json_schema_extra=ADDED,
    )
    task: Literal["classification", "binary", "multilabel", "regression", "tokens", "huggingface", "custom"] = Field(
        "classification", description="the loss and metrics for the model's outputs (or a Task from Python)"
    )
    epochs: int = Field(5, ge=1, description="local epochs per trip (the paper's L)")
    batch_size: int = Field(10, ge=1, description="samples per step; the last, smaller batch is kept")
    lr: float = Field(0.1, gt=0, description="initial learning rate")
    lr_decay: float = Field(
        0.999, gt=0, le=1, description="factor on the learning rate per round (asynchronous rounds: see run.rounds)"
    )
    schedule: Literal["exponential", "constant", "step", "cosine", "custom"] = Field(
        "exponential",
        description="learning rate over rounds: exponential (times lr_decay each round), constant, step (times "
        "lr_decay every schedule_every rounds), cosine (half a cosine, down to 1 %), custom (a function from Python)",
    )
    schedule_by: Literal["rounds", "time"] = Field(
        "rounds",
        description="what the schedule counts: finished rounds, or time, so that all methods have the same rate at the "
        "same second (schedule_seconds seconds since the start of the run count as one round, fractions too)",
        json_schema_extra=ADDED,
    )
    schedule_seconds: float = Field(
        0.0,
        ge=0,
        description='seconds that schedule_by = "time" counts as one round; the paper\'s cells set it to the expected '
        "duration of a synchronous round",
        json_schema_extra=ADDED,
    )
    schedule_every: int = Field(30, ge=1, description="rounds between two steps of the step schedule")
    schedule_rounds: int | None = Field(
        None,
        ge=1,
        description="length of the cosine schedule in rounds (default: the run's expected rounds, written here)",
    )
    steps: int = Field(
        0,
        ge=0,
        description="local steps per trip for any number of samples, in training.epochs equal parts (0: whole epochs)",
    )
    local_epochs: list[int] = Field(
        [], description="[least, most] local epochs, drawn once for each device (empty: training.epochs for all)"
    )
    clip: float = Field(0.0, ge=0, description="bound on the norm of a step's gradient (0: no clipping)")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="where to train")
    fast: bool = Field(
        True,
        description="use fused and compiled layers on the CPU; false uses torch's own, which changes the last bits of "
        "the weights of some networks (the environment variable FRESHET_FAST=0 makes false the default)",
        json_schema_extra=ADDED,
    )
    precision: Literal["float32", "bf16"] = Field(
        "float32",
        description="numbers that the network computes with: float32, or bfloat16 where that is safe (autocast). "
        "Weights, gradients, losses and models that travel stay float32",
        json_schema_extra=ADDED,
    )
    micro_batch_size: int = Field(
        0,
        ge=0,
        description="samples per forward pass. A step accumulates the gradients of its batch's parts, weighted by "
        "what they count, so less memory gives the same step (0: the whole batch at once)",
        json_schema_extra=ADDED,
    )
    gradient_checkpointing: bool = Field(
        False,
        description="compute activations again in the backward pass instead of keeping them, for models that offer it "
        "(gradient_checkpointing_enable, as Hugging Face models do)",
        json_schema_extra=ADDED,
    )
    augment: bool = Field(False, description="random crop and flip of training images")
    optimiser: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="local optimiser; every trip starts with a new state"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    nesterov: bool = Field(False, description="Nesterov momentum")
    weight_decay: float = Field(0.0, ge=0, description="weight decay, added to the gradient (adamw: decoupled from it)")

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
                f"steps = {self.steps} cannot be divided into {self.epochs} epochs; lower epochs or raise steps"
            )
        span = self.local_epochs
        if span and not (len(span) == 2 and 1 <= span[0] <= span[1]):
            raise ValueError(f"local_epochs must be [least, most] with 1 <= least <= most, not {span}")
        if span and self.steps:
            raise ValueError("steps and local_epochs exclude each other; leave one out")
        return self

    @property
    def round_seconds(self) -> float | None:
        """Seconds that the schedule counts as one round; None if it counts rounds."""
        return self.schedule_seconds if self.schedule_by == "time" else None
