"""``python -m dpscaffold.config.reference``: write the files that are generated from the keys."""

from __future__ import annotations

from pathlib import Path

from dpscaffold.config.reference.keys import keys
from dpscaffold.config.reference.page import annotated, annotated_server, page


def main() -> None:
    """Write ``docs/configuration.md`` and the annotated examples."""
    found = keys()
    written = {
        "docs/configuration.md": page(found),
        "examples/annotated.toml": annotated(found),
        "examples/annotated-server.toml": annotated_server(found),
    }
    for name, text in written.items():
        (Path(__file__).parents[4] / name).write_text(text, encoding="utf-8")


main()
