"""Records of hospitals, and files of them as their spreadsheets write them."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import numpy as np

WARDS = ("Chirurgie", "Kinder", "Männer")

#: How files of such records are read; ``path`` and what becomes of a missing weight are left open.
READ_AS = {
    "source": "csv",
    "label": "readmitted",
    "encoding": "auto",
    "delimiter": "auto",
    "decimal": "auto",
    "exclude": ["patient"],
    "dates": {"admitted": "%d.%m.%Y"},
    "categories": ["ward"],
}


def rows_of(site: int, count: int = 40) -> list[dict[str, object]]:
    """Records of one site; every seventh stay and every ninth ward is missing."""
    rng = np.random.default_rng(site)
    rows = []
    for i in range(count):
        age, stay = int(rng.integers(18, 95)), round(float(rng.gamma(2.0, 2.0)), 1)
        admitted = date(2023, 1, 1) + timedelta(days=int(rng.integers(0, 700)))
        rows.append(
            {
                "patient": 100_000 * site + i,
                "age": age,
                "stay": None if i % 7 == 3 else stay,
                "weight": None if i % 11 == 5 else round(float(rng.normal(75, 12)), 1),
                "ward": None if i % 9 == 4 else WARDS[int(rng.integers(3))],
                "admitted": admitted.strftime("%d.%m.%Y"),
                "readmitted": "ja" if age + 8 * stay + rng.normal(0, 8) > 95 else "nein",
            }
        )
    return rows


def write(
    path: Path, rows: list[dict[str, object]], german: bool, encoding: str | None = None
) -> None:
    """A file as a spreadsheet of either country writes it."""
    sign, point = (";", ",") if german else (",", ".")

    def cell(value: object) -> str:
        if value is None:
            return ""
        return str(value).replace(".", point) if isinstance(value, float) else str(value)

    lines = [sign.join(rows[0]), *(sign.join(map(cell, row.values())) for row in rows)]
    text = "\n".join(lines) + "\n"
    path.write_bytes(text.encode(encoding or ("cp1252" if german else "utf-8")))
