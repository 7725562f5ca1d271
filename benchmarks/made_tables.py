"""Tables for ``benchmarks/tables.py`` that need no download: made up, or bundled with scikit-learn
and partitioned to sites that differ.

Each function writes a file, or a folder of one file per site, and returns the options of ``init``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
from sklearn import datasets


@dataclass(frozen=True)
class Written:
    """A table on disk: its path, its label column, its column of sites (None: one file a site)."""

    path: Path
    label: str
    site: str | None


def csv(path: Path, columns: dict[str, Sequence[object]]) -> None:
    """A plain CSV file."""
    lines = [",".join(columns)]
    lines += [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n")


# -- thirteen hospitals, each with files of its own form ------------------------------------------

#: Records by hospital: one has twelve.
HOSPITALS = {
    "charite": 900, "aachen": 640, "oslo": 560, "lyon": 500, "porto": 430, "gent": 390,
    "wien": 340, "turin": 290, "basel": 240, "cork": 200, "riga": 150, "brno": 90, "lille": 12,
}  # fmt: skip
WARDS = ("surgery", "cardiology", "geriatrics", "oncology")


@dataclass(frozen=True)
class Form:
    """How a hospital writes its file."""

    encoding: str = "utf-8"
    sign: str = ","
    point: str = "."
    missing: str = ""
    day: str = "%Y-%m-%d"
    title: str = ""


FORMS = (
    Form("cp1252", ";", ",", "k.A.", "%d.%m.%Y"),
    Form("utf-8", ",", ".", ""),
    Form("utf-16", "\t", ",", "NC"),
    Form("utf-8", ",", ".", "n/a", "%d/%m/%Y", "Export of the ward system"),
    Form("utf-8-sig", ";", ".", "-"),
)
NOTES = ("", "seen by the social service", "lives alone", "wound healing slow; see letter")


def hospitals(folder: Path, seed: int = 0) -> Written:
    """Readmissions at thirteen hospitals: 18 % positives, missing values, shuffled columns, three
    ways to write a date, several encodings, separators and decimal signs, free text, a title above
    a header, wards in capitals here and there, and a file that is no table."""
    rng = np.random.default_rng(seed)
    place = folder / "hospitals"
    place.mkdir()
    for number, (name, count) in enumerate(HOSPITALS.items()):
        rows = _patients(rng, count)
        order = list(rows)
        rng.shuffle(order)
        _write_form(place / f"{name}.csv", {key: rows[key] for key in order}, FORMS[number % 5])
    (place / "README.txt").write_text("Data as of January, exported by hand.\n")
    return Written(place, "readmitted", None)


def _patients(rng: np.random.Generator, count: int) -> dict[str, list[object]]:
    age = np.clip(rng.normal(63 + 3 * rng.normal(), 15, count), 18, 99).round()
    stay = rng.gamma(2.0, 3.0, count).round(1)
    creatinine = np.exp(rng.normal(0.0, 0.4, count)).round(2)
    earlier, ward = rng.poisson(1.0, count), rng.integers(0, len(WARDS), count)
    score = (
        0.04 * (age - 63) + 0.12 * (stay - 6) + 1.1 * np.log(creatinine) + 0.5 * (earlier - 1)
        + np.array([-0.4, 0.3, 0.5, 0.0])[ward] + 0.3 * rng.normal() - 2.0
    )  # fmt: skip
    again = rng.random(count) < 1 / (1 + np.exp(-score))
    first = date(2024, 1, 1)
    return {
        "patient_id": [int(v) for v in rng.integers(10**6, 10**7, count)],
        "age": [int(v) for v in age],
        "stay": [None if rng.random() < 0.05 else float(v) for v in stay],
        "creatinine": [None if rng.random() < 0.1 else float(v) for v in creatinine],
        "earlier": [int(v) for v in earlier],
        "ward": [WARDS[v].capitalize() if rng.random() < 0.1 else WARDS[v] for v in ward],
        "admitted": [first + timedelta(days=int(v)) for v in rng.integers(0, 700, count)],
        "notes": [
            f"{NOTES[v]} {k}" if v else None for k, v in enumerate(rng.integers(0, 4, count))
        ],
        "readmitted": ["yes" if v else "no" for v in again],
    }


def _write_form(path: Path, columns: dict[str, list[object]], form: Form) -> None:
    def cell(value: object) -> str:
        if value is None:
            return form.missing
        if isinstance(value, date):
            return value.strftime(form.day)
        text = str(value).replace(".", form.point) if isinstance(value, float) else str(value)
        return f'"{text}"' if form.sign in text else text

    lines = [form.title] if form.title else []
    lines.append(form.sign.join(columns))
    lines += [form.sign.join(map(cell, row)) for row in zip(*columns.values(), strict=True)]
    path.write_bytes(("\n".join(lines) + "\n").encode(form.encoding))


# -- scikit-learn's own tables, partitioned to sites that differ
# ------------------------------------


def random_sites(rows: np.ndarray, sites: int, seed: int = 0) -> np.ndarray:
    """Sites of unequal sizes whose records differ: cut along a random direction, with noise."""
    rng = np.random.default_rng(seed)
    standard = (rows - rows.mean(0)) / np.maximum(rows.std(0), 1e-9)
    along = standard @ rng.normal(size=rows.shape[1]) / np.sqrt(rows.shape[1])
    place = np.argsort(np.argsort(along + rng.normal(size=len(rows)))) / len(rows)
    return np.searchsorted(np.cumsum(rng.dirichlet(np.full(sites, 4.0)))[:-1], place)


def bundled(load: Callable[[], object], name: str, sites: int, folder: Path) -> Written:
    """A table of scikit-learn."""
    found = load()
    rows, target = np.asarray(found.data), np.asarray(found.target)  # type: ignore[attr-defined]
    columns: dict[str, Sequence[object]] = {f"x{j}": rows[:, j] for j in range(rows.shape[1])}
    label = target if target.dtype.kind == "f" else [f"c{v}" for v in target]
    site = [f"s{v}" for v in random_sites(rows, sites)]
    csv(folder / f"{name}.csv", {**columns, "site": site, "outcome": label})
    return Written(folder / f"{name}.csv", "outcome", "site")


def cancer(folder: Path) -> Written:
    """Breast cancer, 30 measurements of 569 tumours, at five sites."""
    return bundled(datasets.load_breast_cancer, "cancer", 5, folder)


def wine(folder: Path) -> Written:
    """Three cultivars of wine, 178 bottles, at three sites: hardly any records."""
    return bundled(datasets.load_wine, "wine", 3, folder)


def diabetes(folder: Path) -> Written:
    """Progress of diabetes, 442 patients, at five sites: a number."""
    return bundled(datasets.load_diabetes, "diabetes", 5, folder)


# -- made-up tables whose sites differ ------------------------------------------------------------


def mixed(
    name: str, sites: int, records: int, width: int, signal: float, differ: float, kind: str
) -> Callable[[Path], Written]:
    """Sites of log-normal sizes, with means and models of their own as far as they ``differ``."""

    def write(folder: Path) -> Written:
        rng = np.random.default_rng(len(name) + sites)
        common = rng.normal(size=width)
        common *= signal / np.linalg.norm(common)
        blend = np.eye(width) + 0.5 * rng.normal(size=(width, width)) / np.sqrt(width)
        rows, labels, where = [], [], []
        for site in range(sites):
            count = max(15, int(records * np.exp(0.7 * rng.normal())))
            x = (rng.normal(size=(count, width)) + differ * rng.normal(size=width)) @ blend
            own = common + 0.5 * differ * signal * rng.normal(size=width) / np.sqrt(width)
            score = x @ own + 0.5 * differ * rng.normal()
            if kind == "number":
                labels.append(np.round(50 + 10 * (score + rng.normal(size=count)), 1))
            elif kind == "classes":
                turned = np.stack([score, x @ np.roll(own, 1), x @ np.roll(own, 2)])
                labels.append((turned + rng.gumbel(size=turned.shape)).argmax(0))
            else:
                labels.append((rng.random(count) < 1 / (1 + np.exp(1 - score))).astype(int))
            rows.append(x)
            where.append(np.full(count, site))
        x, y = np.concatenate(rows).round(3), np.concatenate(labels)
        columns: dict[str, Sequence[object]] = {f"x{j}": x[:, j] for j in range(width)}
        outcome = y if kind == "number" else [f"c{v}" for v in y]
        csv(folder / f"{name}.csv", {"site": np.concatenate(where), **columns, "outcome": outcome})
        return Written(folder / f"{name}.csv", "outcome", "site")

    return write


#: Every table that can be made here.
MADE: dict[str, Callable[[Path], Written]] = {
    "hospitals": hospitals,
    "cancer": cancer,
    "wine": wine,
    "diabetes": diabetes,
    "forty": mixed("forty", 40, 60, 12, 1.0, 0.5, "two"),
    "hundred": mixed("hundred", 100, 50, 6, 0.8, 1.0, "two"),
    "three": mixed("three", 12, 150, 8, 1.5, 0.5, "classes"),
    "numbers": mixed("numbers", 30, 80, 10, 1.0, 0.5, "number"),
    "few": mixed("few", 100, 20, 5, 1.0, 0.5, "number"),
}
