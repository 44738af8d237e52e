"""The Trainer of Hugging Face transformers as it is. A callback reports its steps to the trip.

    Federation(model=MyModel, trainer=TransformersTrainer(per_device_train_batch_size=16), ...)

The trip decides epochs, learning rate and seed. Everything else is as in ``TrainingArguments``, with a constant
learning rate and without files by default. Samples (x, y) become dicts for the model's ``forward``.
"""

import inspect
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from freshet.errors import ConfigError
from freshet.training.own_loop import DeviceData, Trip

NEEDS_TRANSFORMERS = "transformers or accelerate is not installed; install it with: pip install 'freshet-fl[hf]'"
#: Arguments that suit a trip: no files, no output, a rate that the federation's schedule decides.
QUIET: dict[str, Any] = {
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "remove_unused_columns": False,
    "lr_scheduler_type": "constant",
}


class TransformersTrainer:
    """A training loop for ``Federation(trainer=...)``.

    ``arguments`` go to ``TrainingArguments``. ``trainer_class`` is a subclass of ``transformers.Trainer``.
    ``columns`` names the arguments of ``forward`` for x and y (default: its first one, and ``labels``).
    """

    def __init__(
        self,
        trainer_class: type | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        columns: tuple[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        if find_spec("transformers") is None or find_spec("accelerate") is None:
            raise ConfigError("trainer", NEEDS_TRANSFORMERS)
        self.trainer_class, self.data_collator = trainer_class, data_collator
        self.columns, self.arguments = columns, arguments

    def __call__(self, model: nn.Module, data: DeviceData, trip: Trip) -> dict[str, float]:
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        class TrainerSteps(TrainerCallback):  # type: ignore[misc,unused-ignore]
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                trip.steps_per_epoch = math.ceil(state.max_steps / trip.epochs)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop |= not trip.step(1)

        of_trip: dict[str, Any] = {"num_train_epochs": trip.epochs, "learning_rate": trip.lr, "seed": trip.seed}
        of_trip |= {"use_cpu": next(model.parameters()).device.type == "cpu"}
        with tempfile.TemporaryDirectory() as folder:
            trainer = (self.trainer_class or Trainer)(
                model=model,
                args=TrainingArguments(**QUIET | self.arguments | of_trip | {"output_dir": folder}),
                train_dataset=data,
                data_collator=self.data_collator or ColumnCollator(self.columns or input_names(model)),
                callbacks=[TrainerSteps()],
            )
            trainer.remove_callback(PrinterCallback)
            found = trainer.train()
        return {"loss": float(found.training_loss)}


class ColumnCollator:
    """Collates samples (x, y) into a dict. Samples that are dicts are collated as they are."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        batch = default_collate(samples)
        return dict(batch) if isinstance(batch, Mapping) else dict(zip(self.names, batch, strict=True))


def input_names(model: nn.Module) -> tuple[str, str]:
    """The names under which the model takes its inputs and labels."""
    first = next(iter(inspect.signature(model.forward).parameters))
    return str(getattr(model, "main_input_name", first)), "labels"
