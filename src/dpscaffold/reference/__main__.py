"""``python -m dpscaffold.reference``: write the reference anew, for the command and the docs."""

from __future__ import annotations

from pathlib import Path

from dpscaffold.reference.keys import keys
from dpscaffold.reference.page import annotated, page, stored


def main() -> None:
    """Write ``keys.json``, ``docs/configuration.md`` and ``examples/annotated.toml``."""
    found = keys()
    home = Path(__file__).parent
    (home / "keys.json").write_text(stored(found), encoding="utf-8")
    tree = home.parents[2]
    if (tree / "docs").is_dir():
        (tree / "docs" / "configuration.md").write_text(page(found), encoding="utf-8")
        (tree / "examples" / "annotated.toml").write_text(annotated(found), encoding="utf-8")


main()
