"""Mutated tables (CSV, Parquet, ``.npz``), alone or as folders, and their settings."""

from __future__ import annotations

import datetime
import decimal
import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from dpscaffold.config import parse
from dpscaffold.data import load_federation, prepare
from dpscaffold.data.drafts.draft import draft
from dpscaffold.data.drafts.profile import look
from dpscaffold.errors import BadInput

#: Cells of every kind, to be put anywhere in a table.
CELLS = (
    *("", "NA", "nan", "inf", "-1e400", "1e39", "1e-50", "0", "-0", "1,5", "1.5", "1_000", " 7 "),
    *('"', '""', "'", "\\", "a;b", "a,b", "x" * 3000, "ε", "Köln", "\x00", "\ufeff", "٣", "=1+1"),
    *("2024-02-30", "31.12.2023", "20240131", "9999-12-31", "0001-01-01", "true", "null", "[1]"),
    *("?", "-", " ? ", "k. A.", "-9", "-9.0", "9999", "<5"),
)
NAMES = ("age", "stay", "ward", "site", "ill", "when", "id", "", "a b", "ü", "label", "x.y", '"')
ENCODINGS = ("utf-8", "latin-1", "utf-16", "utf-8-sig", "cp1252", "auto", "klingon", "utf-7", "")


def attempt(rng: random.Random, folder: Path) -> str:
    """Write a table, say something about it, and have it read, looked at or prepared."""
    home = folder / "tables"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    write, source = rng.choice(_KINDS)
    path, names = _laid_out(rng, home, write)
    settings = _settings(rng, source, path, names)
    attempt.last = [f"{settings!r}"]  # type: ignore[attr-defined]
    if rng.random() < 0.3:
        attempt.last = [f"init {path}"]  # type: ignore[attr-defined]
        _initialised(path)
    elif rng.random() < 0.15:
        prepare(settings, home / "prepared", notify=str)
    else:
        load_federation(settings, str)
    return ""


def _initialised(path: Path) -> None:
    """What ``init`` does, and what is drafted must be a configuration of which data are read."""
    text = draft(look(path), 1.0)
    try:
        settings = parse(tomllib.loads(text))
    except BadInput as error:
        raise AssertionError(f"the draft is refused ({error})") from error
    load_federation(settings.data, str)


def _laid_out(
    rng: random.Random, home: Path, write: Callable[[random.Random, Path], list[str]]
) -> tuple[Path, list[str]]:
    """One file, a folder of some, or folders that name a column; bytes are changed in some."""
    if rng.random() < 0.6:
        path = home / "one"
        return _damaged(rng, path, write)
    names: list[str] = []
    again = rng.getrandbits(32)
    for i in range(rng.randint(1, 3)):
        inside = home / (f"site={'nsé'[i]}" if rng.random() < 0.3 else "")
        inside.mkdir(exist_ok=True)
        alike = random.Random(again) if rng.random() < 0.8 else rng
        found = _damaged(rng, inside / f"part{i}", lambda _, p, alike=alike: write(alike, p))
        names = names or found[1]
    return rng.choice((home, home / "part*", home / "*")), names


def _damaged(
    rng: random.Random, stem: Path, write: Callable[[random.Random, Path], list[str]]
) -> tuple[Path, list[str]]:
    names = write(rng, stem)
    path = next(file for file in stem.parent.iterdir() if file.stem == stem.name)
    if rng.random() < 0.25:
        raw = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 8) if raw else 0):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        if rng.random() < 0.2:
            raw = raw[: rng.randrange(len(raw) + 1)]
        path.write_bytes(raw)
    return path, names


def _csv(rng: random.Random, stem: Path) -> list[str]:
    names = rng.sample(NAMES, rng.randint(1, 6))
    if rng.random() < 0.05:
        names.append(names[0])
    sign, point = rng.choice(((",", "."), (";", ","), ("\t", "."), ("|", ".")))
    kinds = [rng.randrange(5) for _ in names]
    lines = [sign.join(names)]
    for row in range(rng.choice((0, 1, 5, 25, 60))):
        cells = [_cell(rng, kind, row).replace(".", point) for kind in kinds]
        if rng.random() < 0.08:
            cells[rng.randrange(len(cells))] = rng.choice(CELLS)
        if rng.random() < 0.01:
            cells = cells[:-1] if rng.random() < 0.5 else [*cells, "1"]
        lines.append(sign.join(cells))
    ends = rng.choice(("\n", "\n", "\r\n", "\r"))
    encoding = rng.choice(("utf-8", "utf-8", "latin-1", "utf-16", "utf-8-sig"))
    stem.with_suffix(".csv").write_bytes((ends.join(lines) + ends).encode(encoding, "replace"))
    return names


def _cell(rng: random.Random, kind: int, row: int) -> str:
    if kind == 0:
        return f"{rng.gauss(50, 20):.2f}"
    if kind == 1:
        return rng.choice(("yes", "no"))
    if kind == 2:
        return rng.choice(("Köln", "Bonn", "Trier"))
    if kind == 3:
        return str(datetime.date(2023, 1, 1) + datetime.timedelta(days=rng.randrange(700)))
    return str(1000 + row)


_COLUMNS: tuple[Callable[[random.Random, int], pa.Array], ...] = (
    lambda rng, n: pa.array([rng.gauss(0, 1) for _ in range(n)]),
    lambda rng, n: pa.array([rng.randrange(3) for _ in range(n)]),
    lambda rng, n: pa.array([rng.choice(("a", "b", None)) for _ in range(n)]),
    lambda rng, n: pa.array([rng.choice(("yes", "no")) for _ in range(n)]),
    lambda rng, n: pa.array([rng.random() < 0.5 for _ in range(n)]),
    lambda rng, n: pa.array([datetime.date(2023, 1, 1 + i % 28) for i in range(n)]),
    lambda rng, n: pa.array([datetime.datetime(2023, 1, 1, i % 24) for i in range(n)]),
    lambda rng, n: pa.array([[1.0, 2.0]] * n, pa.list_(pa.float64())),
    lambda rng, n: pa.array([b"\xff"] * n),
    lambda rng, n: pa.array([{"a": 1}] * n),
    lambda rng, n: pa.array([decimal.Decimal("1.50")] * n),
    lambda rng, n: pa.nulls(n),
    lambda rng, n: pa.array([rng.choice(("p", "q")) for _ in range(n)]).dictionary_encode(),
    lambda rng, n: pa.array([float("inf"), float("nan")] * n)[:n],
    lambda rng, n: pa.array([2**62] * n),
)


def _parquet(rng: random.Random, stem: Path) -> list[str]:
    names = rng.sample(NAMES, rng.randint(1, 6))
    count = rng.choice((0, 1, 5, 30))
    columns = [rng.choice(_COLUMNS)(rng, count) for _ in names]
    table = pa.Table.from_arrays(columns, names=names)
    pa.parquet.write_table(table, stem.with_suffix(".parquet"))
    return names


_ARRAYS: tuple[Callable[[int], np.ndarray], ...] = (
    lambda n: np.arange(n) % 2,
    lambda n: np.arange(n, dtype=np.float32),
    lambda n: np.array(["ill", "well"] * n)[:n],
    lambda n: np.array([b"ill", b"well"] * n)[:n],
    lambda n: np.full(n, np.nan),
    lambda n: np.linspace(0, 1, max(n, 1))[:n],
    lambda n: np.arange(n) - 1,
    lambda n: np.full(n, 2**40),
    lambda n: np.ones((n, 2)),
    lambda n: np.ones(n, dtype=bool),
    lambda n: np.ones(n, dtype=complex),
    lambda n: np.array(3),
    lambda n: np.full(n, "2024-01-01", dtype="datetime64[D]"),
)


def _npz(rng: random.Random, stem: Path) -> list[str]:
    n = rng.choice((0, 1, 6, 40))
    arrays: dict[str, np.ndarray] = {"features": np.ones((n, 3)) * np.arange(n)[:, None]}
    if rng.random() < 0.3:
        arrays["features"] = rng.choice(_ARRAYS)(n)
    arrays["labels"] = rng.choice(_ARRAYS)(rng.choice((n, n, n, n + 1)))
    for name in ("users", "classes"):
        if rng.random() < 0.5:
            arrays[name] = rng.choice(_ARRAYS)(rng.choice((n, n, 2)))
    if rng.random() < 0.1:
        del arrays[rng.choice(list(arrays))]
    np.savez(stem.with_suffix(".npz"), **arrays)
    return list(arrays)


_KINDS = ((_csv, "csv"), (_csv, "csv"), (_csv, "csv"), (_parquet, "parquet"), (_npz, "npz"))


def _settings(rng: random.Random, source: str, path: Path, names: list[str]) -> dict[str, Any]:
    """Settings that suit the table more often than not."""
    said: dict[str, Any] = {"source": source, "path": str(path)}

    def some(most: int) -> list[str]:
        chosen = rng.sample(names, min(len(names), rng.randint(0, most)))
        return [*chosen, rng.choice(NAMES)] if rng.random() < 0.05 else chosen

    if source in ("csv", "parquet"):
        said["label"] = rng.choice(names or ["ill"])
        if rng.random() < 0.4:
            said["user"] = rng.choice((*names, "site"))
        options: dict[str, Callable[[], Any]] = {
            "categories": lambda: some(3),
            "exclude": lambda: some(2),
            "dates": lambda: dict.fromkeys(some(2), rng.choice(FORMS)),
            "values": lambda: dict.fromkeys(some(2), _spellings(rng)),
            "absent": lambda: some(2),
            "ranges": lambda: dict.fromkeys(some(2), rng.choice(ENDS)),
            "missing": lambda: rng.choice(("drop", 0.0, "refuse", _rules(rng, names))),
            "na_values": lambda: rng.choice((_markers(rng), dict.fromkeys(some(3), _markers(rng)))),
            "target": lambda: rng.choice(("class", "number", {"kind": "number", **_ends(rng)})),
            "features": lambda: some(3),
            "classes": lambda: rng.choice((["yes", "no"], ["a", "b"], ["0", "1", "2"])),
        }
        said |= {key: value() for key, value in options.items() if rng.random() < 0.35}
    if source == "csv":
        said["delimiter"] = rng.choice((",", "auto", "auto", "auto", ";", "\t", '"', "\n", "é"))
        said["encoding"] = rng.choice(("auto", "auto", "auto", *ENCODINGS))
        said["decimal"] = rng.choice((".", ",", "auto", "auto"))
    if source == "npz" and rng.random() < 0.5:
        said["partition"] = "natural"
    if rng.random() < 0.5:
        said["users"] = rng.choice((1, 2, 3, 40))
    if rng.random() < 0.3:
        said["minimum_records"] = rng.choice((2, 5, 1000))
    if rng.random() < 0.3:
        step = rng.choice(("standardise", "unit-norm", "pca:1", "pca:99", "centre", "clip-norm:1"))
        said["preprocess"] = ["centre", step]
    return said


#: Forms of dates, and ranges of columns, as people may write them.
FORMS = ("%Y-%m-%d", "%q", "", "%d", [], ["%d.%m.%Y", "%Y-%m-%d"], ["%d/%m/%y", "%m/%d/%y"])
ENDS = ([0, 1], [-1e30, 1e30], [1, 0], ["2020-01-01", "2021-01-01"], ["x", 1], 3, [0, None])


def _ends(rng: random.Random) -> dict[str, Any]:
    """The range of a number to predict, now and then none that may be."""
    return {key: rng.choice((0, 1.5, -3, 1e300, "0", None)) for key in ("low", "high")}


def _spellings(rng: random.Random) -> Any:
    """Spellings of values, now and then none that may be."""
    wrong = ("?", {"yes": "no"}, {"yes": [1]}, {"": [""]}, [])
    cells = rng.sample(CELLS, 4)
    return rng.choice(wrong) if rng.random() < 0.2 else {cells[0]: cells[1:3], cells[3]: []}


def _markers(rng: random.Random) -> Any:
    """NA strings, now and then none that may be."""
    wrong = ("?", [""], [-9], ["\x00"], {"*": "?"}, None)
    return rng.choice(wrong) if rng.random() < 0.1 else rng.sample(CELLS, rng.randint(0, 4))


def _rules(rng: random.Random, names: list[str]) -> dict[str, Any]:
    rules = ("drop", "indicator", "category", 0.0, "refuse")
    return {name: rng.choice(rules) for name in [*names, "*"] if rng.random() < 0.6}
