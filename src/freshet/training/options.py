"""Settings of local training."""

from typing import Literal

from pydantic import Field

from freshet.core.method import Options


class TrainingOptions(Options):
    """Local SGD on a device."""

    epochs: int = Field(5, ge=1, description="local epochs per trip (the paper's L)")
    batch_size: int = Field(10, ge=1, description="samples per SGD step; the last, smaller batch is kept")
    lr: float = Field(0.1, gt=0, description="learning rate at the start")
    lr_decay: float = Field(
        0.999, gt=0, le=1, description="factor on the learning rate per round, or its worth in uploads"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="where the model lives while it trains")
    augment: bool = Field(False, description="random crop and flip of training images")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD; every trip starts without any")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of SGD")
