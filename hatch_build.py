"""The README and the links of the registry's page, from the one address in pyproject.toml.

A registry shows the README away from its repository, where relative links and pictures lead
nowhere: they become absolute ones. Without an address the README stays as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = r"(!\[[^\]]*\]\()(?!https?:)([^)]+)"
LINK = r"((?<!!)\[[^\]]*\]\()(?!https?:|#)([^)]+)"


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository, branch = self.config["repository"].rstrip("/"), self.config["branch"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if repository:
            text = absolute(text, repository, branch)
            metadata["urls"] = {
                "Homepage": repository,
                "Documentation": f"{repository}/tree/{branch}/docs",
                "Source": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{repository}/blob/{branch}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, branch: str) -> str:
    """A README whose relative pictures and links are those of the repository."""
    text = re.sub(PICTURE, rf"\g<1>{repository}/raw/{branch}/\g<2>", text)
    return re.sub(LINK, rf"\g<1>{repository}/blob/{branch}/\g<2>", text)
