"""Settings of local training."""

from typing import Any, Literal

from pydantic import Field, model_validator

from freshet.core.method import Options


class TrainingOptions(Options):
    """Local training on a device."""

    epochs: int = Field(5, ge=1, description="local epochs per trip (the paper's L)")
    batch_size: int = Field(10, ge=1, description="samples per step; the last, smaller batch is kept")
    lr: float = Field(0.1, gt=0, description="learning rate at the start")
    lr_decay: float = Field(
        0.999, gt=0, le=1, description="factor on the learning rate per round, or its worth in uploads"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="where the model lives while it trains")
    augment: bool = Field(False, description="random crop and flip of training images")
    optimiser: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="how a step follows from a gradient; every trip starts with a new one"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    nesterov: bool = Field(False, description="Nesterov's form of the momentum")
    weight_decay: float = Field(0.0, ge=0, description="weight decay, part of the gradient (adamw: apart from it)")

    @model_validator(mode="before")
    @classmethod
    def _momentum_is_for_sgd(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if given.get("optimiser", "sgd") != "sgd" and (given.get("momentum") or given.get("nesterov")):
            raise ValueError('momentum and nesterov are for optimiser = "sgd"; leave them out')
        if given.get("nesterov") and not given.get("momentum"):
            raise ValueError("nesterov needs a momentum above 0")
        return given
