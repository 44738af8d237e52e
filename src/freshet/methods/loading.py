"""Methods from elsewhere: a class given from Python, ``file.py:Class``, ``module:Class`` also of the current folder.

What is loaded from a folder that Python does not search goes to worker processes by value, since they could not import
it; ``sys.path`` is as before once it is loaded."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

#: Stands in a config.toml for the module of a class that cannot be imported: ``custom:Mine``.
CUSTOM = "custom"
_files: dict[Path, ModuleType] = {}


class MethodRef(str):
    """The name of a method that was given as a class, and the class behind it."""

    __slots__ = ("method",)
    method: type

    def __new__(cls, method: type) -> "MethodRef":
        name = super().__new__(cls, import_path(method))
        name.method = method
        return name

    def __getnewargs__(self) -> Any:
        return (self.method,)


def import_path(method: type) -> str:
    """``module:Class`` where that leads back to the class, else ``custom:Class``."""
    module, name = method.__module__, method.__qualname__
    try:
        found = module != "__main__" and importlib.util.find_spec(module) is not None
        if found and nested_attribute(sys.modules[module], name) is method:
            return f"{module}:{name}"
    except (ImportError, AttributeError, KeyError, ValueError):
        pass
    return f"{CUSTOM}:{method.__name__}"


def nested_attribute(module: ModuleType, path: str) -> Any:
    """``Outer.Inner`` of a module."""
    return reduce(getattr, path.split("."), module)


def load_object(path: str) -> Any:
    """What ``module:Class`` or ``file.py:Class`` stands for; whatever goes wrong inside is raised as it is."""
    where, _, name = path.rpartition(":")
    return nested_attribute(_module_of_file(Path(where)) if where.endswith(".py") else _import_module(where), name)


def _module_of_file(path: Path) -> ModuleType:
    """The module that a file holds, executed once per process."""
    path = path.resolve()
    if path in _files:
        return _files[path]
    name = f"freshet_method_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _search_path(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _pickle_by_value(module)
    _files[path] = module
    return module


def _import_module(name: str) -> ModuleType:
    """A module that Python finds, or that lies in the current folder."""
    with _search_path(Path.cwd()):
        return importlib.import_module(name)


@contextmanager
def _search_path(folder: Path) -> Iterator[None]:
    """Search a folder for modules, after all others; what is found there travels by value."""
    if any(Path(entry or ".").resolve() == folder for entry in sys.path if isinstance(entry, str)):
        yield
        return
    importlib.invalidate_caches()  # the file may be a moment old
    before = set(sys.modules)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and folder in Path(file).resolve().parents:
            _pickle_by_value(sys.modules[name])


def _pickle_by_value(module: ModuleType) -> None:
    """Send what a module holds with its code: elsewhere it could not be imported."""
    from cloudpickle import register_pickle_by_value

    register_pickle_by_value(module)
