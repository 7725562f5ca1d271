"""``python -m dpscaffold.config.reference``: write the reference anew, for the command and the
docs."""

from __future__ import annotations

from pathlib import Path

from dpscaffold.config.reference.keys import keys
from dpscaffold.config.reference.page import annotated, annotated_server, page, stored


def main() -> None:
    """Write ``keys.json``, ``docs/configuration.md`` and the annotated examples."""
    found = keys()
    home = Path(__file__).parent
    (home / "keys.json").write_text(stored(found), encoding="utf-8")
    tree = home.parents[3]
    if (tree / "docs").is_dir():
        written = {
            "docs/configuration.md": page(found),
            "examples/annotated.toml": annotated(found),
            "examples/annotated-server.toml": annotated_server(found),
        }
        for name, text in written.items():
            (tree / name).write_text(text, encoding="utf-8")


main()
