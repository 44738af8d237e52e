"""Trees of plain values and arrays as bytes: safetensors with a JSON note. Bytes may come from anybody."""

import json
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.runs.arrays import Stored, contents, serialised
from freshet.runs.checkpoint import Tree, owned, pack, unpack

_NOTE = "tree"


class Malformed(ValueError):
    """Bytes or records that are not what they should be; the text says why."""


def to_bytes(tree: Tree) -> bytes:
    """A tree in one piece."""
    plain, arrays = pack(tree)
    return b"".join(bytes(piece) for piece in serialised(arrays, {_NOTE: json.dumps(plain)}))


def from_bytes(data: bytes) -> Tree:
    """The inverse of ``to_bytes``; raises ``Malformed``."""
    try:
        found, notes = contents(BytesIO(data))
        tree: Any = owned(unpack(json.loads(notes[_NOTE]), _views(data, found)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Malformed(f"not a tree of values and arrays ({type(error).__name__}: {error})") from None
    if not isinstance(tree, dict):
        raise Malformed("not a tree of values and arrays")
    return tree


def _views(data: bytes, found: dict[str, Stored]) -> dict[str, NDArray[Any]]:
    whole = np.frombuffer(data, np.uint8)
    return {name: whole[a.start : a.end].view(a.dtype).reshape(a.shape) for name, a in found.items()}
