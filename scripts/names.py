"""Count names in ``src/freshet`` that are used twice, and functions named by a bare participle.

    python scripts/names.py             the lists; exits with 1 unless all are empty
    python scripts/names.py --counts    one line of counts

A module name may occur twice where the package tells the two apart: a command in ``cli`` has the name of what it shows,
and each world has its ``driver``. A function that returns a bool may be a participle (``finished``, ``stalled``).
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "freshet"
#: One per world, or one per package by convention.
OBVIOUS = {"__init__", "driver", "audit"}
# fmt: off
IRREGULAR = {
    "told", "sent", "kept", "made", "given", "shown", "said", "held", "seen", "drawn", "known", "found",
    "taken", "built", "chosen", "begun", "gone", "hidden", "lost", "meant", "met", "paid", "spent", "thrown",
    "torn", "understood", "won", "written", "bought", "brought", "caught", "dealt", "done", "driven", "fallen",
    "felt", "forgotten", "frozen", "got", "grown", "heard", "laid", "led", "lent", "proven", "sold", "stood",
    "struck", "taught", "thought", "worn", "woven",
}
# fmt: on
#: Words that end in -ed and are nouns, verbs or names.
NO_PARTICIPLE = {"feed", "need", "seed", "speed", "embed", "proceed", "exceed", "succeed"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text())


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return "_" not in word and word not in NO_PARTICIPLE and (word.endswith("ed") or word in IRREGULAR)


def is_badly_named(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a bare participle names a function that does not return a truth value."""
    returns_truth = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
    return is_participle(function.name) and not returns_truth


def findings() -> dict[str, list[str]]:
    """The three lists, as lines to print."""
    names: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    participles = []
    for path, tree in modules():
        if path.parts[0] != "cli" and path.stem not in OBVIOUS:
            names[path.stem].append(str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_badly_named(node):
                participles.append(f"{path}:{node.lineno} {node.name}")
    return {
        "module names used twice": [f"{name}: {', '.join(at)}" for name, at in sorted(names.items()) if len(at) > 1],
        "class names used twice": [f"{name}: {', '.join(at)}" for name, at in sorted(classes.items()) if len(at) > 1],
        "functions named by a bare participle": participles,
    }


def main(counts_only: bool) -> int:
    found = findings()
    print(f"{sum(1 for _ in modules())} modules; " + "; ".join(f"{what}: {len(at)}" for what, at in found.items()))
    if not counts_only:
        for what, lines in found.items():
            for line in lines:
                print(f"{what}: {line}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main("--counts" in sys.argv[1:]))
