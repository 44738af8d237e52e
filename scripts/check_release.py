"""Refuse a release whose tag, version, changelog, citation or address do not agree.

usage: python scripts/check_release.py TAG ADDRESS, for example v0.2.0 https://HOST/OWNER/NAME. Standard library only.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def problems(tag: str, address: str, root: Path = ROOT) -> Iterator[str]:
    """What is in the way of the release, one sentence each."""

    def read(name: str) -> str:
        return (root / name).read_text(encoding="utf-8")

    (version,) = re.findall(r'^__version__ = "(.+)"$', read("src/freshet/_version.py"), re.MULTILINE)
    if tag != f"v{version}":
        yield f"the tag {tag} is not v{version}, the version in src/freshet/_version.py"
    if not re.search(rf"^## {re.escape(version)}\b.*\d{{4}}-\d\d-\d\d", read("CHANGELOG.md"), re.MULTILINE):
        yield f"CHANGELOG.md has no dated section for {version}"
    if f"\nversion: {version}\n" not in read("CITATION.cff"):
        yield f"CITATION.cff does not name version {version}"
    named = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    if named != address:
        yield f"repository in pyproject.toml is {named!r}, and this is {address}"


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python scripts/check_release.py TAG ADDRESS", file=sys.stderr)
        return 2
    tag, address = sys.argv[1:]
    found = list(problems(tag, address))
    print("\n".join(found) or f"{tag}: ready")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
