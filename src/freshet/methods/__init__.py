"""The methods, one file each.

A method is named by the ``about.name`` of its class, by one of its variants, by ``module:Class`` or ``file.py:Class``,
or by the class itself.
"""

import importlib
import inspect
import pkgutil
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from freshet.core.about import About
from freshet.core.method import Method, Options, first_problem
from freshet.errors import ConfigError
from freshet.methods import loading


@cache
def registry() -> dict[str, type[Method]]:
    """Return all methods by name: this package's modules, then entry points of the group ``freshet.methods``."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.ispkg:
            _collect(importlib.import_module(f"{__name__}.{module.name}"), found)
    for entry in entry_points(group="freshet.methods"):
        method = _check_method_class(entry.load(), f"{entry.value!r} (an entry point of freshet.methods)")
        found[method.about.name] = method
    return dict(sorted(found.items()))


def _collect(module: Any, found: dict[str, type[Method]]) -> None:
    for _, value in inspect.getmembers(module, inspect.isclass):
        if issubclass(value, Method) and value.__module__ == module.__name__ and "about" in vars(value):
            found[value.about.name] = value


def method_names() -> list[str]:
    """Return every name that ``--method`` accepts: methods and their variants."""
    return sorted(name for method in registry().values() for name in method.about.names)


def method_name(method: object) -> str:
    """Return the name of a method given as a name or a class. The name of a class is a ``MethodRef``."""
    if inspect.isclass(method):
        return loading.MethodRef(_check_method_class(method, method.__name__))
    if not isinstance(method, str):
        raise ConfigError("method.name", f"must be a string or a subclass of freshet.Method, but {method!r} was given")
    return method


def class_and_preset(name: str) -> tuple[type[Method], dict[str, Any]]:
    """Return the class behind a name and the options that its variant presets."""
    if isinstance(name, loading.MethodRef):
        return name.method, {}
    if ":" in name:
        return _load_class(name), {}
    for method in registry().values():
        if name in method.about.names:
            return method, dict(method.about.variants.get(name, {}))
    close = get_close_matches(name.lower(), method_names(), n=1, cutoff=0.75)
    hint = (
        f"did you mean {close[0]}?"
        if close
        else f"choose one of {', '.join(method_names())}, module:Class or file.py:Class"
    )
    raise ConfigError("method.name", f"{name!r} is not known; {hint}")


def builtin_about(name: str) -> About | None:
    """Return the header of a built-in method or variant, or None. Foreign code is never imported."""
    return next((method.about for method in registry().values() if name in method.about.names), None)


def _load_class(path: str) -> type[Method]:
    try:
        method = loading.load_object(path)
    except Exception as error:  # foreign code may raise anything
        if path.startswith(f"{loading.CUSTOM}:"):
            again = "give it again, as in Federation(method=TheClass, ...).resume(RUN)"
            raise ConfigError("method.name", f"{path!r} stands for a class given from Python; {again}") from None
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        problem = _missing_class_problem(path, error) or f"{path!r} cannot be imported ({why})"
        raise ConfigError("method.name", problem) from error
    return _check_method_class(method, repr(path))


def _missing_class_problem(path: str, error: Exception) -> str | None:
    """Say that the module lacks the class and list the classes it has; None if the error is a different one."""
    where, _, name = path.rpartition(":")
    module = getattr(error, "obj", None)
    if not (isinstance(error, AttributeError) and inspect.ismodule(module) and error.name == name.split(".")[0]):
        return None
    own = (value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__)
    classes = [value.__qualname__ for value in own if inspect.isclass(value) and issubclass(value, Method)]
    has = f"it has {', '.join(classes)}" if classes else "it has no subclass of freshet.Method"
    return f"{path!r} cannot be imported (module {where!r} has no attribute {name!r}); {has}"


def _check_method_class(method: Any, who: str) -> type[Method]:
    """Return ``method`` if it is a complete subclass of ``Method``."""
    if not (inspect.isclass(method) and issubclass(method, Method)):
        raise ConfigError("method.name", f"{who} is not a subclass of freshet.Method")
    about = getattr(method, "about", None)
    if not isinstance(about, About):
        needed = 'about = About(name, "async" or "sync", title, citation)'
        raise ConfigError("method.name", f"{who} has no header; add {needed} to the class")
    if not issubclass(method.Options, Options):
        raise ConfigError("method.name", f"{who} has Options of another kind; derive them from freshet.Options")
    for key in {*about.space, *(key for space in about.spaces.values() for key in space)}:
        if key not in method.Options.model_fields:
            raise ConfigError(f"method.{key}", f"{who} has it in about.space, but not among its options")
    return method


def method_options(name: str, given: dict[str, Any]) -> Any:
    """Return the checked options of a method: its defaults, then its variant's preset, then ``given``."""
    method, preset = class_and_preset(name)
    for key, value in preset.items():
        if given.get(key, value) != value:
            own = method.about.name
            raise ConfigError(f"method.{key}", f"{name} sets it to {value}; use {own} to choose it yourself")
    try:
        return method.Options(**(preset | given))
    except ValidationError as error:
        raise first_problem("method", error, method.Options) from None
