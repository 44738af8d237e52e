"""A batch of one sample, of which BatchNorm can take no statistics: torch's error in words that help."""

from collections.abc import Iterable

from freshet.errors import ConfigError

#: How torch's complaint begins.
_TORCH_SAYS = "Expected more than 1 value per channel when training"


def explained(
    error: ValueError, device: int, samples: int, batch_size: int, shards: Iterable[int]
) -> ConfigError | None:
    """One sentence that names the setting to change; None if the error is of another kind.

    ``samples`` are those that the device trains on, ``shards`` those that each device does.
    """
    if not str(error).startswith(_TORCH_SAYS) or not _leaves_one(samples, batch_size):
        return None
    other = 'take a norm without batch statistics (model.norm = "group"; nn.GroupNorm in a model of your own)'
    if samples == 1:
        problem = f"device {device} trains on a single sample, but BatchNorm needs two or more in a batch"
        return ConfigError("data.min_samples", f"{problem}; give every device at least two, or {other}")
    problem = f"{batch_size} leaves device {device} ({samples} samples) a batch of one, but BatchNorm needs two or more"
    choice = f"choose one that leaves no device a single sample, such as {_next_size(batch_size, shards)}"
    return ConfigError("training.batch_size", f"{problem}; {choice}, or {other}")


def _leaves_one(samples: int, batch_size: int) -> bool:
    return batch_size == 1 or samples % batch_size == 1


def _next_size(batch_size: int, shards: Iterable[int]) -> int:
    """The next larger batch that leaves no device a single sample: at the latest, it holds all samples of a device."""
    sizes = {size for size in shards if size > 1}
    larger = range(batch_size + 1, max(sizes) + 2)
    return next(size for size in larger if not any(_leaves_one(samples, size) for samples in sizes))
