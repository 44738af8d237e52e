"""Convert state to plain data and back: any dataclass to nested dicts and lists of numbers, strings and arrays.

Each owner of state keeps it in one dataclass and needs no code to save it. A field with its own ``state()`` and
``restore()`` (a store backed by files) saves itself. Values that could not be restored are refused when they are saved.
"""

import dataclasses
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from itertools import chain, repeat
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from freshet.errors import RunError

T = TypeVar("T")
Tree = dict[str, Any]
#: What state and memory may hold.
ALLOWED = "use numbers, strings, lists, tuples, dicts and numpy arrays"
#: What a line of the log may hold.
LOGGABLE = "use numbers, strings, lists and dicts"


def dump(state: Any, place: str = "the state") -> Any:
    """Plain data of a dataclass (``{}`` for None). Arrays are not copied.

    Raises a ``RunError`` for values that could not be restored. ``place`` names the dataclass in it.
    """
    return {} if state is None else _plain(type(state), state, place)


def restore(state: Any, tree: Mapping[str, Any]) -> None:
    """Restore a dataclass from saved data. Arrays are copied, since the saved ones may be mapped from a file."""
    if state is None:
        return
    kind: Any = type(state)
    hints = _hints(kind)
    for field in dataclasses.fields(state):
        saved, now = tree[field.name], getattr(state, field.name)
        if hasattr(now, "restore"):
            now.restore(saved)
        else:
            setattr(state, field.name, _rebuild(hints[field.name], saved))


def rebuild(kind: type[T], saved: Any) -> T:
    """A dataclass or named tuple from what ``dump`` made of it. Arrays are copied."""
    made: T = _rebuild(kind, saved)
    return made


# ---- what can be saved


def saving_problem(value: Any, place: str, arrays: bool = True) -> str | None:
    """Why plain data cannot be saved, and at which place; None if they can. A log holds no arrays."""
    kind = type(value)
    if kind is dict:
        parts = (saving_problem(item, f"{place}[{key!r}]", arrays) for key, item in value.items())
        return _odd_key(value, place) or _first(parts)
    if kind in (list, tuple):
        return _first(saving_problem(item, f"{place}[{number}]", arrays) for number, item in enumerate(value))
    if is_leaf(value) and (arrays or not isinstance(value, np.ndarray)):
        return None
    return f"{place} is a {_name(value)}; {ALLOWED if arrays else LOGGABLE}"


def is_leaf(value: object) -> bool:
    """Whether this is a number, a string, None or an array of numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufU"
    return value is None or isinstance(value, int | float | str)


def is_key(key: object) -> bool:
    """Whether a dict's key can be saved: a number, a string, None, or a tuple of these."""
    return all(map(is_key, key)) if type(key) is tuple else not isinstance(key, np.ndarray) and is_leaf(key)


def _odd_key(items: Mapping[Any, Any], place: str) -> str | None:
    odd = next((key for key in items if not is_key(key)), None)
    return None if odd is None else f"{place} has a key that is a {_name(odd)}; use numbers, strings or tuples of them"


def _first(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


def _name(value: object) -> str:
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{name} of {value.dtype}" if isinstance(value, np.ndarray) else name


def _plain(hint: Any, value: Any, place: str) -> Any:
    """A value as plain data. ``hint`` is its annotation, which decides how it is restored."""
    if hasattr(value, "restore"):
        return value.state()
    hint, kind = _without_none(hint), type(value)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        if (get_origin(hint) or hint) is not kind:
            raise RunError(f"{place} is a {kind.__name__}, but would not be restored as one; name it in the annotation")
        parts = {name: _plain(each, getattr(value, name), f"{place}.{name}") for name, each in _hints(kind).items()}
        return parts if dataclasses.is_dataclass(kind) else list(parts.values())
    problem = None
    if kind in (dict, types.MappingProxyType):
        each = _item(hint)
        problem = _odd_key(value, place)
        value = {key: _plain(each, item, f"{place}[{key!r}]") for key, item in value.items()}
    elif kind in (list, tuple):
        items = enumerate(zip(_items(hint), value, strict=False))
        value = kind(_plain(each, item, f"{place}[{number}]") for number, (each, item) in items)
    else:
        problem = saving_problem(value, place)
    if problem is None and not (value is None or isinstance(value, np.ndarray) or _fits(hint, value)):
        says = hint.__name__ if isinstance(hint, type) else hint
        problem = f"{place} is a {_name(value)}, but its annotation says {says}"
    if problem is not None:
        raise RunError(problem)
    return value


# ---- what annotations say


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The annotation of each field of a dataclass or named tuple; Any if it cannot be resolved."""
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]
    try:
        found = get_type_hints(kind)
    except NameError:  # a string that names something local, or imported for type checkers only
        found = {name: hint for name, hint in kind.__annotations__.items() if not isinstance(hint, str)}
    return {name: found.get(name, Any) for name in names}


def _without_none(hint: Any) -> Any:
    """An annotation without ``| None``; of several types, the first."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _fits(hint: Any, value: Any) -> bool:
    """Whether plain data match their annotation."""
    kind = get_origin(hint) or hint
    if kind in (bool, int, float, str):
        return isinstance(value, bool | int | float | str | np.generic)
    if kind in (dict, list):
        return isinstance(value, kind)
    arguments = get_args(hint)
    fixed = kind is tuple and arguments and arguments[-1] is not ...
    return kind is not tuple or (isinstance(value, tuple) and (not fixed or len(value) == len(arguments)))


def _item(hint: Any) -> Any:
    """The annotation of a dict's values."""
    return get_args(hint)[1] if get_origin(hint) is dict else Any


def _items(hint: Any) -> Iterable[Any]:
    """The annotations of the items of a list or tuple, one after the other and without end."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list or (origin is tuple and arguments[-1:] == (...,)):
        return repeat(arguments[0])
    return chain(arguments if origin is tuple else (), repeat(Any))


def _rebuild(hint: Any, saved: Any) -> Any:
    """Rebuild a saved value. Its annotation names dataclasses and named tuples. The value is not trusted."""
    hint = _without_none(hint)
    kind: Any = get_origin(hint) or hint
    if saved is None:
        return None
    if isinstance(saved, np.ndarray) or kind is np.ndarray:
        return np.array(saved)
    if dataclasses.is_dataclass(kind):
        made: Any = kind
        hints = _hints(made)
        return made(**{name: _rebuild(hints[name], value) for name, value in saved.items()})
    if hasattr(kind, "_fields"):
        return kind(*(_rebuild(each, value) for each, value in zip(_hints(kind).values(), saved, strict=True)))
    if isinstance(saved, dict):
        key, item = get_args(hint)[0] if get_origin(hint) is dict else Any, _item(hint)
        found: Any = {_rebuild(key, name): _rebuild(item, value) for name, value in saved.items()}
    elif isinstance(saved, list | tuple):
        each = tuple if kind is tuple else type(saved)  # format 1 has lists instead of tuples
        found = each(_rebuild(item, value) for item, value in zip(_items(hint), saved, strict=False))
    elif kind in (int, float) and isinstance(saved, str):  # format 1 has strings instead of numbers as keys
        return kind(saved)
    else:
        found = kind(saved) if isinstance(kind, type) and issubclass(kind, Enum | np.generic) else saved
    if not _fits(hint, found):
        raise ValueError(f"{str(saved)[:40]!r} is not of {kind}")
    return found
