"""``freshet.open``: the ``Result`` of a run that is over, from its directory alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import nn

from freshet.config import CUSTOM, resolve
from freshet.core.vectors import Vector
from freshet.errors import RunError
from freshet.parts import built_in
from freshet.result import Rebuilt, Result
from freshet.runs.reader import Run
from freshet.runs.world import RunWorld, read_world
from freshet.runs.writer import weights_sha256
from freshet.training.network import Factory, as_factory


def open(directory: str | Path, model: Factory | nn.Module | None = None) -> Result:
    """What a run has left behind: rows, summary, weights, and the final model as a module.

    A built-in network is built again from the run's settings; one of your own has to be given, here or to ``module``.
    """
    run = Run(directory)
    summary = run.summary()
    weights, frozen = _weights(run.directory)
    if weights_sha256(weights) != summary.get("weights_sha256"):
        raise RunError(f"{directory}/model.safetensors is not the model that summary.json tells of")
    world = read_world(run.directory)
    factory = _built_in(run, world) if model is None else as_factory(model)
    rebuilt = Rebuilt(factory, resolve(run.config()).run.seed, frozen=frozen)
    if world is not None and world.mean is not None and world.std is not None:
        rebuilt = replace(rebuilt, mean=tuple(world.mean), std=tuple(world.std))
    return Result(run.directory, summary, run.metrics(), weights, rebuilt)


def _built_in(run: Run, world: RunWorld | None) -> Factory | None:
    """What builds the network that the run's settings name; None for one that was given from Python."""
    config = resolve(run.config())
    if config.model.name == CUSTOM or world is None or world.sample_shape is None or world.outputs is None:
        return None
    return built_in(config, world.sample_shape, world.outputs, world.vocabulary, world.pad_id)


def _weights(directory: Path) -> tuple[Vector, dict[str, NDArray[Any]]]:
    """The flat vector, in the order in which its tensors lay there, and the tensors that were not in it."""
    path = directory / "model.safetensors"
    try:
        with safe_open(path, framework="numpy") as file:
            order = json.loads((file.metadata() or {})["order"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = [_flat(tensors.pop(name), channels_last) for name, channels_last in order]
        return np.concatenate(parts, dtype=np.float32), tensors
    except KeyError as error:
        raise RunError(f"{path} cannot be used: {error.args[0]} is missing") from None
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be used ({error})") from None


def _flat(tensor: NDArray[Any], channels_last: bool) -> NDArray[Any]:
    return (tensor.transpose(0, 2, 3, 1) if channels_last else tensor).reshape(-1)
