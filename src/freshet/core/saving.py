"""State as plain data: nested dicts and lists of numbers, texts and arrays, from any dataclass and back.

Whoever has state keeps it in one dataclass; nothing else is to be written for it to be saved and resumed. A field whose
value has ``state()`` and ``restore()`` of its own (a store with files behind it) is asked instead.
"""

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

Tree = dict[str, Any]


def dump(state: Any) -> Any:
    """Plain data of a dataclass (``{}`` for None); arrays are handed over as they are."""
    return {} if state is None else _plain(state)


def restore(state: Any, tree: Mapping[str, Any]) -> None:
    """Put saved data back into a dataclass of the same kind. Arrays are copied: the saved ones may lie in a file."""
    if state is None:
        return
    for field in dataclasses.fields(state):
        saved, now = tree[field.name], getattr(state, field.name)
        if hasattr(now, "restore"):
            now.restore(saved)
        else:
            kind: Any = type(state)
            hint = _hints(kind)[field.name] if isinstance(field.type, str) else field.type
            setattr(state, field.name, _typed(hint, saved))


def _plain(value: Any) -> Any:
    if hasattr(value, "restore"):
        return value.state()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _typed(hint: Any, saved: Any) -> Any:
    """A saved value as what its annotation says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if saved is None else _typed(next(kind for kind in arguments if kind is not type(None)), saved)
    if origin is np.ndarray or hint is np.ndarray:
        return np.array(saved)
    if origin is dict:
        key, item = arguments
        return {key(name): _typed(item, value) for name, value in saved.items()}
    if origin is list:
        return [_typed(arguments[0], value) for value in saved]
    if origin is tuple:
        return tuple(_typed(kind, value) for kind, value in zip(arguments, saved, strict=True))
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        return kind(**{name: _typed(_hints(kind)[name], value) for name, value in saved.items()})
    if hasattr(hint, "_fields"):
        kinds = _hints(hint)
        return hint(*(_typed(kinds[name], value) for name, value in zip(hint._fields, saved, strict=True)))
    return hint(saved) if isinstance(hint, type) and saved is not None else saved
