"""``python -m dpscaffold.config.reference``: write the page that is generated from the keys."""

from __future__ import annotations

from pathlib import Path

from dpscaffold.config.reference.keys import keys
from dpscaffold.config.reference.page import page


def main() -> None:
    """Write ``docs/configuration.md``."""
    root = Path(__file__).parents[4]
    (root / "docs" / "configuration.md").write_text(page(keys()), encoding="utf-8")


main()
