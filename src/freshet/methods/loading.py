"""Load foreign methods: a class given from Python, ``file.py:Class``, or ``module:Class`` (the current folder too).

Modules from a folder that is not on ``sys.path`` are sent to worker processes by value, because workers cannot import
them. Loading leaves ``sys.path`` unchanged.
"""

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

#: Replaces the module in config.toml if a class cannot be imported: ``custom:Mine``.
CUSTOM = "custom"
_files: dict[Path, ModuleType] = {}


class MethodRef(str):
    """The name of a method that was given as a class, with the class itself.

    It is a str because names pass through configuration tables, TOML, JSON, hashes and pickles as plain text.
    """

    __slots__ = ("method",)
    method: type

    def __new__(cls, method: type) -> "MethodRef":
        name = super().__new__(cls, import_path(method))
        name.method = method
        return name

    def __getnewargs__(self) -> Any:
        return (self.method,)


def import_path(method: type) -> str:
    """Return ``module:Class`` if that imports the class again, else ``custom:Class``."""
    module, name = method.__module__, method.__qualname__
    try:
        found = module != "__main__" and importlib.util.find_spec(module) is not None
        if found and nested_attribute(sys.modules[module], name) is method:
            return f"{module}:{name}"
    except (ImportError, AttributeError, KeyError, ValueError):
        pass
    return f"{CUSTOM}:{method.__name__}"


def nested_attribute(module: ModuleType, path: str) -> Any:
    """Return ``Outer.Inner`` of a module."""
    return reduce(getattr, path.split("."), module)


def load_object(path: str) -> Any:
    """Return the object at ``module:Class`` or ``file.py:Class``. Errors of the loaded code pass through."""
    where, _, name = path.rpartition(":")
    return nested_attribute(_module_of_file(Path(where)) if where.endswith(".py") else _import_module(where), name)


def _module_of_file(path: Path) -> ModuleType:
    """Return the module of a file, executed once per process."""
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
    """Import a module from ``sys.path`` or from the current folder."""
    with _search_path(Path.cwd()):
        return importlib.import_module(name)


@contextmanager
def _search_path(folder: Path) -> Iterator[None]:
    """Search a folder for modules, after all others. Modules found there are pickled by value."""
    if any(Path(entry or ".").resolve() == folder for entry in sys.path if isinstance(entry, str)):
        yield
        return
    importlib.invalidate_caches()  # the file may be newer than the caches
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
    """Pickle a module's contents with their code, because workers cannot import it."""
    from cloudpickle import register_pickle_by_value

    register_pickle_by_value(module)
