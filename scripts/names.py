"""Count names in ``src/freshet`` that are used twice, and functions named by a bare participle.

    python scripts/names.py             the lists; exits with 1 unless all are empty
    python scripts/names.py --counts    one line of counts

A module name may occur twice where the room makes it obvious: a command in ``cli`` bears the name of what it shows, and
each world has its ``driver``. A function that returns a truth value may be a participle (``finished``, ``stalled``).
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "freshet"
#: One per world, or one per room by convention.
OBVIOUS = {"__init__", "driver", "audit"}
IRREGULAR = set(
    "told sent kept made given shown said held seen drawn known found taken built chosen begun gone hidden left lost "
    "meant met paid put read run set split spread spent thrown torn understood won written cut bound bought brought "
    "caught dealt done driven eaten fallen felt fought forgotten frozen got grown heard hurt laid led lent lit "
    "proven ridden risen sold shut sunk slept stood struck swept taught thought woken worn woven".split()
) - {"read", "run", "set", "split", "put", "cut", "spread", "left", "bound", "lit", "shut"}
#: Words that end in -ed and are nouns, verbs or names.
NO_PARTICIPLE = {"feed", "need", "seed", "speed", "embed", "proceed", "exceed", "succeed", "fed", "fixed_speed"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text())


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return "_" not in word and word not in NO_PARTICIPLE and (word.endswith("ed") or word in IRREGULAR)


def returns_truth(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return isinstance(function.returns, ast.Name) and function.returns.id == "bool"


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
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if is_participle(node.name) and not returns_truth(node):
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
