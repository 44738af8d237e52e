"""The protections of a run as sections of its configuration, and which of them go together with what."""

from typing import Any

from pydantic import BaseModel

from freshet.core.compression import LinkOptions
from freshet.core.defence import DefenceOptions
from freshet.core.layout import Layout
from freshet.errors import ConfigError
from freshet.methods._shared.rounds import RoundMethod
from freshet.privacy import PrivacyOptions
from freshet.training.outgoing import AttackOptions

#: Sections by name; below, ``config`` is a ``freshet.config.Config`` that holds them.
PROTECTION: dict[str, type[BaseModel]] = {
    "links": LinkOptions,
    "defence": DefenceOptions,
    "attack": AttackOptions,
    "privacy": PrivacyOptions,
}


def check_protection(config: Any) -> None:
    """Raise a ``ConfigError`` for what no section can check alone."""
    if config.defence.rule == "multi-krum" and not issubclass(config.method_class, RoundMethod):
        problem = f"compares a round's uploads before any is used, but {config.method_name} uses each as it comes"
        raise ConfigError("defence.rule", f"multi-krum {problem}; use clip or median-distance")
    kind, task = config.attack.kind, config.training.task
    if kind in ("label-flip", "backdoor") and task != "classification":
        raise ConfigError("attack.kind", f"{kind} is for classification, but the task is {task}; use sign-flip")
    if config.privacy.on:
        _check_private(config)


def _check_private(config: Any) -> None:
    """All that leaves a device is covered by the noise, or does not depend on its samples."""
    leak = config.method_class.rule(config.method).leak()
    if leak is not None:
        raise ConfigError("privacy.clip", f"does not cover all that {config.method_name} sends: {leak}")
    if config.run.evaluate_devices != "never":
        problem = 'does not cover scores of the devices; set run.evaluate_devices to "never"'
        raise ConfigError("privacy.clip", problem)


def check_layout(config: Any, layout: Layout) -> None:
    """Raise a ``ConfigError`` for a network with something that noise must not touch."""
    if config.privacy.on and layout.size != layout.learnable:
        problem = "does not cover running statistics of the network; choose one without, or set model.norm to group"
        raise ConfigError("privacy.clip", problem)


def check_deployable(config: Any) -> None:
    """Raise a ``ConfigError`` for what only the simulator can do."""
    if not config.links.plain:
        problem = "is for simulations; over a network models travel as they are: leave links.down and links.up at none"
        raise ConfigError("links", problem)
    if config.attack.kind != "none":
        raise ConfigError("attack.kind", "is for simulations; leave it at none")
