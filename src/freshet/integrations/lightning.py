"""A LightningModule as it is. Lightning's own Trainer carries out each trip.

    Federation(model=MyLightningModule, trainer=LightningTrainer(batch_size=16), ...)

``forward`` gives the outputs that the federation's task scores. An attribute ``lr`` or ``learning_rate`` of the module,
or such an entry of its ``hparams``, gets the trip's learning rate.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from torch import nn

from freshet.errors import ConfigError
from freshet.training.own_loop import DeviceData, Trip

NEEDS_LIGHTNING = "Lightning is not installed; install it with: pip install 'freshet-fl[lightning]'"
#: Options of Lightning's Trainer that suit a trip: it writes no files and prints nothing.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class LightningTrainer:
    """A training loop for ``Federation(trainer=...)``. ``options`` go to ``lightning.Trainer``."""

    def __init__(self, batch_size: int | None = None, **options: Any) -> None:
        if find_spec("lightning") is None:
            raise ConfigError("trainer", NEEDS_LIGHTNING)
        self.batch_size, self.options = batch_size, options

    def __call__(self, model: nn.Module, data: DeviceData, trip: Trip) -> dict[str, float]:
        from lightning.pytorch import Callback, LightningModule, Trainer

        if not isinstance(model, LightningModule):
            raise ConfigError("model", f"LightningTrainer needs a LightningModule, not {type(model).__name__}")

        class LightningSteps(Callback):  # type: ignore[misc,unused-ignore]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.should_stop = not trip.step(1)

        set_learning_rate(model, trip.lr)
        kind = next(model.parameters()).device.type
        place = {"accelerator": "gpu" if kind == "cuda" else kind, "devices": 1}
        options: dict[str, Any] = QUIET | place | {"max_epochs": trip.epochs} | self.options
        with quiet("lightning.pytorch"):
            trainer = Trainer(**options | {"callbacks": [*_callbacks(options), LightningSteps()]})
            trainer.fit(model, data.batches(self.batch_size))
        model.trainer = None  # type: ignore[assignment,unused-ignore]  # the two refer to each other
        return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _callbacks(options: dict[str, Any]) -> list[Any]:
    given = options.get("callbacks") or []
    return list(given) if isinstance(given, list | tuple) else [given]


def set_learning_rate(module: Any, lr: float) -> None:
    """Set the learning rate where Lightning's own tools look for it."""
    for name in ("lr", "learning_rate"):
        if hasattr(module, name):
            setattr(module, name, lr)
        if name in module.hparams:
            module.hparams[name] = lr


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silence a library's remarks. Its warnings would come once per trip."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
