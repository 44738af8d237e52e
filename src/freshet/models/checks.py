"""Checks of a network's own options; each failure names the key as the user writes it in a configuration."""

from collections.abc import Sequence

from freshet.errors import ConfigError


def whole(key: str, value: object, low: int = 1) -> int:
    """A whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(key, f"{value!r} is not a whole number of at least {low}")
    return value


def wholes(key: str, value: object) -> tuple[int, ...]:
    """A list of whole numbers of at least 1; it may be empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(key, f"{value!r} is not a list of whole numbers")
    return tuple(whole(key, v) for v in value)


def rate(key: str, value: object) -> float:
    """A dropout rate: a number from 0 up to, but not including, 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigError(key, f"{value!r} is not a number in [0, 1)")
    return float(value)


def flag(key: str, value: object) -> bool:
    """True or false, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ConfigError(key, f"{value!r} is not true or false")
    return value


def image_shape(name: str, shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """(channels, height, width), each side at least `smallest` pixels."""
    if len(shape) != 3:
        raise ConfigError(
            "model.name", f"{name} reads images (channels, height, width), but one sample has shape {tuple(shape)}"
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise ConfigError(
            "model.name", f"{name} needs images of at least {smallest}x{smallest} pixels, not {height}x{width}"
        )
    return channels, height, width
