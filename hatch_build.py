"""Packaging: the README of the package index.

Relative links and pictures are dead there. With the repository's address (pyproject.toml) they become absolute. Without
an address pictures are left out and links become their words, so that nothing on the page is broken.
"""

import re
from pathlib import Path
from typing import Any

#: A fenced block, which stays as it is, or a link or picture whose target is neither a URL nor an anchor.
_LINK = re.compile(
    r"(?P<code>^```.*?^```$)|(?P<picture>!?)\[(?P<words>[^\[\]]*)\]\((?![a-z]+:|#)(?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
_ADDRESS = re.compile(r"https://[\w.-]+(/[\w.-]+)+")


def package_readme(text: str, repository: str, ref: str) -> str:
    """README.md for the package index, with links to this tag or branch of the repository."""

    def replace(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        if not repository:
            return "" if found["picture"] else found["words"]
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}[{found['words']}]({repository}/{kind}/{ref}/{found['target']})"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(replace, text))


def project_urls(repository: str, ref: str) -> dict[str, str]:
    """The links beside the README on the package index."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{ref}/CHANGELOG.md",
    }


def git_ref(version: str) -> str:
    """The tag of a release. A version in development has none and points to the default branch."""
    return "HEAD" if "dev" in version else f"v{version}"


def get_metadata_hook() -> type:
    """The hook that hatchling calls. Imported here: the functions above need no hatchling."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface

    class PackageReadme(MetadataHookInterface):
        def update(self, metadata: dict[str, Any]) -> None:
            repository = self.config["repository"]
            if repository and not _ADDRESS.fullmatch(repository):
                raise ValueError(f"repository in pyproject.toml must be https://HOST/OWNER/NAME, not {repository!r}")
            ref = git_ref(metadata["version"])
            text = package_readme(Path(self.root, "README.md").read_text(encoding="utf-8"), repository, ref)
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
            metadata["urls"] = project_urls(repository, ref)

    return PackageReadme
