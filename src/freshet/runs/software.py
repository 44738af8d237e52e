"""The software that a run is computed with. Checkpoints hold it, because other code can give other bits.

A run that is resumed with other software says so ever after: in its log, its checkpoints and its summary.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from freshet._version import __version__
from freshet.core.method import LocalRule, Method
from freshet.errors import RunError
from freshet.methods._shared.rebase import Rebasing
from freshet.runs.checkpoint import Tree

#: Packages whose arithmetic decides a run's bits.
PACKAGES = ("torch", "numpy")
#: Modules that every method derives from. Freshet's version stands for them.
_COMMON = ("builtins", "abc", "typing", "freshet.core.method")
NOTE_ABOUT = "software"


def software(method: type[Method], rule: LocalRule) -> dict[str, str]:
    """Versions of Freshet and of the packages that compute, and a hash of the method's source files."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    rules = [rule, *([rule.inner] if isinstance(rule, Rebasing) else [])]
    classes = [*method.__mro__, *(kind for each in rules for kind in type(each).__mro__)]
    return {"freshet": __version__} | versions | {"method": source_hash(classes)}


def source_hash(classes: Iterable[type]) -> str:
    """A hash of the files that define these classes. Empty if a file is unknown, as in an interactive session."""
    digest = hashlib.sha256()
    for name in sorted({kind.__module__ for kind in classes} - set(_COMMON)):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or not Path(file).is_file():
            return ""
        digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
    return digest.hexdigest()[:16]


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What has changed, in words. What one of the two does not know is not compared."""
    both = [name for name in before if before[name] and now.get(name) and before[name] != now[name]]
    return ["the method's source" if name == "method" else f"{name} {before[name]} -> {now[name]}" for name in both]


def accept_software(tree: Tree, now: Mapping[str, str], accept: bool, directory: Path, remedy: str) -> None:
    """Compare the software of a run that is to be resumed. Raises for a change that is not accepted.

    The tree then holds all ``changes`` in the life of the run, and the ``new_changes`` among them.
    """
    new = differences(tree.get("software", {}), now)
    if new and not accept:
        raise RunError(
            f"{directory} was computed with other software ({', '.join(new)}), so it may go on with other results; "
            f"restore the software, or accept the change: {remedy}"
        )
    tree |= {"changes": [*tree.get("changes", []), *new], "new_changes": new}
