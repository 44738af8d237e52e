"""Short hashes of what a run was made of, so that it is never gone on with over other data without a word.

Arrays count with every bit; inputs that stay outside memory with an even sample, their labels with every one.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from freshet.data.adapters import LazyRows, evenly_spaced
from freshet.data.dataset import DataSet
from freshet.data.shards import DeviceTests
from freshet.sim.fleet import Fleet
from freshet.training.network import layout_of

#: What each hash is of, in words for a person.
WORDS = {"data": "data", "shards": "shards (which device holds which samples)", "model": "model", "fleet": "fleet"}
#: What the hashes of parts depend on besides the part: shards are dealt from the data, and a fleet's work from both.
FOLLOWS = {"shards": {"data"}, "fleet": {"data", "shards"}}
#: Inputs outside memory that are looked at, and rows of an array that are hashed at a time.
SAMPLED, ROWS = 64, 1024
Tables = Mapping[str, Mapping[str, Any]]
_DIGITS = 16


def digest(pieces: Iterable[Any]) -> str:
    """The hash of arrays and plain values, in order; an array's type and shape are part of it."""
    found = hashlib.sha256()
    for piece in pieces:
        if isinstance(piece, np.ndarray):
            found.update(f"{piece.dtype.str}{piece.shape}\n".encode())
            rows = np.atleast_1d(piece)
            for start in range(0, len(rows), ROWS):
                found.update(np.ascontiguousarray(rows[start : start + ROWS]).tobytes())
        else:
            found.update((json.dumps(piece, default=lambda scalar: scalar.item()) + "\n").encode())
    return found.hexdigest()[:_DIGITS]


def fingerprint(
    dataset: DataSet,
    tests: DeviceTests | None,
    shards: Sequence[NDArray[np.int64]],
    model: str,
    fleet: Fleet,
) -> dict[str, str]:
    """One hash each of data, shards, model (names, shapes, the numbers it starts with) and fleet."""
    return {
        "data": digest(_data(dataset, tests)),
        "shards": digest(shards),
        "model": model,
        "fleet": digest(_fleet(fleet)),
    }


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The parts, in words, of which both know a hash and the hashes differ; not what may follow from another's."""
    found = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
    return [WORDS.get(name, name) for name in found if not FOLLOWS.get(name, set()) & set(found)]


def unequal(mine: Tables, theirs: Tables) -> list[str]:
    """``section.key`` of the settings that are not the same; of another method only that it is one."""
    both = {section: (mine.get(section, {}), theirs.get(section, {})) for section in {**mine, **theirs}}
    found = [f"{section}.{key}" for section, (a, b) in both.items() for key in {**a, **b} if a.get(key) != b.get(key)]
    return ["method.name"] if "method.name" in found else found


def _data(dataset: DataSet, tests: DeviceTests | None) -> Iterable[Any]:
    yield [dataset.classes, dataset.mean, dataset.std, dataset.pad_id, dataset.vocabulary]
    for x, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        yield from (y, *_rows(x))
    if tests is not None:
        yield from tests.shards
        yield from tests.data or ()


def _rows(x: NDArray[Any] | LazyRows) -> Iterable[Any]:
    """All samples, or of those outside memory an even sample; a source that draws anew each time has no content."""
    if not isinstance(x, LazyRows):
        yield x
        return
    yield [list(x.shape), x.dtype.str]
    some = evenly_spaced(len(x), SAMPLED)
    seen = x.read(some)
    if np.array_equal(seen, x.read(some)):
        yield seen


def model_digest(module: nn.Module) -> str:
    """The hash of a module at its start: layout, parameters that train, parameters that do not, buffers."""
    return digest(_model(module))


def _model(module: nn.Module) -> Iterable[Any]:
    yield [[entry.name, list(entry.shape), entry.kind] for entry in layout_of(module).entries]
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            yield name
            yield tensor.detach().float().cpu().numpy()


def _fleet(fleet: Fleet) -> Iterable[Any]:
    """Every figure; of a trace the rows of every device."""
    for each in fields(fleet):
        value = getattr(fleet, each.name)
        if each.name.startswith("_") or (each.name == "start_seconds" and not value.any()):
            continue
        yield each.name
        if each.name == "trace":
            yield None if value is None else [[history.rows, history.cycle] for history in value.histories]
        else:
            yield value
