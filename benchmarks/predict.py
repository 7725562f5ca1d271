"""``dpscaffold predict`` on many rows: wall-clock and processor time, and memory.

    python benchmarks/predict.py [--rows 1000000] [--kind csv] [--files 1] [--folder FOLDER]

A model of 48 numbers and two categories (standardised, unit-norm, 10 classes) predicts for a file
of this many rows, as the command does, in a process of its own; the file is written first and not
timed. Several files are a folder, and so are their predictions. Memory is the largest resident set
of that process.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch

from dpscaffold import Logistic, Model
from dpscaffold.data.loading import load_federation

NUMBERS, TEXTS = 48, {"ward": tuple("abcdefgh"), "sex": ("f", "m")}
BATCH = 100_000


def rows(count: int, seed: int, labelled: bool = False) -> pa.RecordBatch:
    """Raw rows; with ``labelled`` a class and a site besides."""
    rng = np.random.default_rng(seed)
    columns = {f"x{j:02d}": rng.normal(size=count).round(5) for j in range(NUMBERS)}
    columns |= {name: rng.choice(values, count) for name, values in TEXTS.items()}
    if labelled:
        columns |= {"class": rng.integers(0, 10, count), "site": rng.integers(0, 5, count)}
    return pa.record_batch(columns)


def write(path: Path, count: int) -> None:
    """A file of this many rows, block by block."""
    first = rows(1, 0)
    make = pa.parquet.ParquetWriter if path.suffix == ".parquet" else pa.csv.CSVWriter
    with make(path, first.schema) as writer:
        for k, start in enumerate(range(0, count, BATCH)):
            writer.write_batch(rows(min(BATCH, count - start), k))


def model(folder: Path) -> Path:
    """A stored model, its parameters drawn at random."""
    with pa.csv.CSVWriter(folder / "train.csv", rows(1, 0, True).schema) as writer:
        writer.write_batch(rows(2000, 1, True))
    data = load_federation(
        {
            "source": "csv",
            "path": str(folder / "train.csv"),
            "label": "class",
            "user": "site",
            "categories": {name: list(values) for name, values in TEXTS.items()},
        }
    )
    task = Logistic(data.dimension, 10)
    return Model.of(data, task, torch.randn(task.parameters)).save(folder / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=("csv", "parquet"), default="csv")
    parser.add_argument("--files", type=int, default=1, help="files with as many rows in all")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        folder = Path(place)
        data, out = folder / f"new.{asked.kind}", folder / f"out.{asked.kind}"
        if asked.files > 1:
            data, out = folder / "new", folder / "out"
            data.mkdir()
            for k in range(asked.files):
                write(data / f"site{k}.{asked.kind}", asked.rows // asked.files)
        else:
            write(data, asked.rows)
        size = sum(path.stat().st_size for path in (data, *data.rglob("*")) if path.is_file())
        command = [sys.executable, "-m", "dpscaffold", "predict", str(model(folder)), str(data)]
        started = time.perf_counter()
        subprocess.run([*command, "--out", str(out)], check=True)
        passed = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{asked.rows} rows × {NUMBERS + len(TEXTS)} columns of {asked.kind} "
            f"({size / 1e6:.0f} MB) on {os.cpu_count()} cores: {passed:.1f} s, "
            f"{used.ru_utime + used.ru_stime:.1f} s of CPU time, {used.ru_maxrss / 1e6:.2f} GB"
        )


if __name__ == "__main__":
    main()
