"""The project's description for package indexes: README.md with absolute links.

All else is in pyproject.toml, where the project's addresses stand too: an index shows the text away
from the repository, so links to files lead to ``Repository``, under the tag of the version.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)")


def description(text: str, repository: str, version: str) -> str:
    """A text in Markdown whose relative links and images are absolute."""

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        if target.startswith(("https://", "http://", "#", "mailto:")):
            return match[0]
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}{match['text']}({repository}/{kind}/v{version}/{target})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    from setuptools import setup

    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=description(
            (HERE / "README.md").read_text(encoding="utf-8"),
            project["urls"]["Repository"],
            project["version"],
        ),
        long_description_content_type="text/markdown",
    )
