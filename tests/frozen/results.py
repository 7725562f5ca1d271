"""The published tables, as numbers, and the digests of the rows that they were made from.

``python -m frozen.results`` (in ``tests/``) wrote :file:`results.json.gz` from commit 566b2a27.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STORED = HERE / "results.json.gz"
ROOT = HERE.parents[1]
FOLDERS = ("docs/results", "benchmarks/results")
#: Stored rows, by what the name of their file ends with.
ROWS = (".parquet", ".json", ".csv")

_NUMBER = re.compile(r"[-+−]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")

Table = list[list[str]]


def tables(text: str) -> Iterator[Table]:
    """The tables of a Markdown page, each row as the numbers that stand in it, in their order."""
    rows: Table = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append(_NUMBER.findall(line))
        elif rows:
            yield [row for row in rows if row]  # the heading and the line below it may have none
            rows = []


def found(root: Path) -> dict[str, dict[str, Any]]:
    """Tables of pages, and digests of rows, by path."""
    pages: dict[str, list[Table]] = {}
    digests: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix == ".md":
                pages[name] = list(tables(path.read_text(encoding="utf-8")))
            # Tidy rows in text are the same rows once more, where Parquet holds them.
            elif path.suffix in ROWS and not _twice(path):
                digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"tables": pages, "rows": digests}


def _twice(path: Path) -> bool:
    return path.suffix == ".csv" and path.with_suffix(".parquet").exists()


def frozen() -> dict[str, dict[str, Any]]:
    """What stood in the tree of version 0.2.0."""
    stored: dict[str, dict[str, Any]] = json.loads(gzip.decompress(STORED.read_bytes()))
    return stored


def main() -> None:
    """Freeze the present tree, which must be that of version 0.2.0 in these folders."""
    from frozen.old import COMMIT

    command = ["git", "diff", "--quiet", COMMIT, "--", *FOLDERS]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(f"{' and '.join(FOLDERS)} are not those of {COMMIT[:8]}")
    text = json.dumps(found(ROOT), ensure_ascii=False, separators=(",", ":"))
    STORED.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{STORED}: {STORED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
