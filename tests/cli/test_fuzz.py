"""A few hundred mutated configurations, tables and command lines, and what earlier ones found."""

from __future__ import annotations

import random
import time
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from fuzz import KINDS, case, fuzz
from fuzzing.watching import Overdue, watched
from refusals import refuses

from dpscaffold.data import load_federation
from dpscaffold.errors import BadInput


def test_mutations_are_accepted_or_refused():
    assert fuzz(200, seed=1) == []


def test_the_harness_sees_what_it_is_for(tmp_path, monkeypatch):
    """A traceback is a failure, and so is an answer that does not come."""

    def broken(rng: random.Random, folder: Path) -> str:
        raise KeyError("a bug")

    def fine(rng: random.Random, folder: Path) -> str:
        raise BadInput("not-a-number", "a sentence")

    monkeypatch.setattr("fuzz.KINDS", (broken, fine))
    assert "KeyError" in (case(0, 0, tmp_path) or "") and case(0, 1, tmp_path) is None
    assert len({kind.__module__ for kind in KINDS}) == 3
    monkeypatch.setattr("fuzzing.watching.SLOWEST", 0.02)
    monkeypatch.setattr("fuzzing.watching.PATIENCE", 0.01)
    with pytest.raises(Overdue), watched():
        until = time.process_time() + 5
        while time.process_time() < until:
            pass


CSV = {"source": "csv", "path": "a.csv", "label": "ill", "users": 2}
NESTED = {"source": "parquet", "path": "n.parquet", "label": "ill", "users": 2}
NPZ = {"source": "npz", "users": 2}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**CSV, "delimiter": "é"}, "not-one-character: delimiter is 'é'"),
        ({**CSV, "encoding": "utf-16"}, "wrong-encoding: a.csv"),
        ({**CSV, "encoding": "utf-16", "decimal": "auto"}, "wrong-encoding: a.csv"),
        ({**CSV, "user": "ill"}, "column-named-twice: 'ill'"),
        ({**NESTED, "categories": ["list"]}, "not-text: 'list'"),
        ({**NPZ, "path": "damaged.npz"}, "file-unreadable"),
        ({**NPZ, "path": "crowd.npz"}, "too-many-classes"),
        ({**NPZ, "path": "complex.npz"}, "not-numbers"),
        ({**NPZ, "path": "one.npz", "partition": "natural"}, "count-differs: for 1"),
    ],
)
def test_tables_that_fuzzing_found(settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("age,ill\n1,no\n2,yes\n")
    table = pa.table({"list": [[1.0], [2.0]], "ill": ["no", "yes"]})
    pa.parquet.write_table(table, tmp_path / "n.parquet")
    x = np.ones((4, 2))
    np.savez(tmp_path / "crowd.npz", features=x, labels=np.full(4, 2**40))
    np.savez(tmp_path / "complex.npz", features=x * 1j, labels=np.arange(4) % 2)
    np.savez(tmp_path / "one.npz", features=x, labels=np.arange(4) % 2, users=np.array(3))
    (tmp_path / "damaged.npz").write_bytes((tmp_path / "one.npz").read_bytes()[:-10])
    with refuses(said):
        load_federation(settings)


def test_a_draft_of_odd_names_is_a_configuration(tmp_path):
    """Signs that TOML does not take as they are, in a folder, a column and a category."""
    from dpscaffold.config import parse
    from dpscaffold.data.drafts.draft import draft
    from dpscaffold.data.drafts.profile import look

    rows = "\n".join(f"{i % 9},{'ab'[i % 2]}\x7f,{'yn'[i % 2]}" for i in range(40))
    (tmp_path / "a\x7f\x01.csv").write_text(f'ag"\x7fe,ward,ill\n{rows}\n')
    tables = tomllib.loads(draft(look(tmp_path / "a\x7f\x01.csv"), 1.0))
    parse(tables)
    assert tables["data"]["path"].endswith("a\x7f\x01.csv")
