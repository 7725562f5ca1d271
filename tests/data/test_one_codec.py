"""A table that training accepts is read identically by everyone who reads tables.

Six readers: training in memory, ``data prepare``, prediction, evaluation, the exported module, and
a deployed site. What a table means is known before it is written, so each reader is compared with
that and not with another reader.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpscaffold.data import load_federation, prepare
from dpscaffold.data.config import parse_data
from dpscaffold.data.loading import read_pool
from dpscaffold.deployment.protocol.agreement import SchemaSettings
from dpscaffold.deployment.site import lines as lines_module
from dpscaffold.deployment.site.reading import read_records
from dpscaffold.models.evaluate import score_rows
from dpscaffold.models.model import Model
from dpscaffold.tasks import Logistic

SEXES, CLASSES = ("männlich", "weiblich"), ("gesund", "krank")
SPELLINGS = {"sex": {"männlich": ["M", "m."]}, "ill": {"krank": ["ja", "Ja"]}}
NA_STRINGS = {"stay": ["-9", "?"], "born": ["k. A."], "sex": ["unbek."]}
FORMS = ("%d.%m.%Y", "%Y-%m-%d")
COLUMNS = ("age", "stay", "born", "sex")
FILL = 7.0


@dataclass(frozen=True)
class Written:
    """A cell as it is written, and what it means: a number, or NaN for a missing value."""

    text: str
    means: float


def number(value: float, decimal: str, grouped: bool) -> str:
    text = f"{value:,.2f}" if grouped and decimal == "," else f"{value:.2f}"
    return text.replace(",", " ").replace(".", decimal).replace(" ", ".")


def cells(decimal: str) -> st.SearchStrategy[tuple[Written, ...]]:
    """A record: age, stay, born, sex and the label."""
    numbers = st.integers(-10_000_000, 10_000_000).map(lambda n: n / 100)
    age = st.builds(lambda v, g: Written(number(v, decimal, g), v), numbers, st.booleans())
    nothing = [Written(text, np.nan) for text in ("", "NA", "-9", f"-9{decimal}0", "?")]
    stay = st.sampled_from(nothing) | age.filter(lambda cell: cell.means != -9)
    days = st.integers(-20_000, 20_000)
    born = st.sampled_from([Written("", np.nan), Written("k. A.", np.nan)]) | st.builds(
        lambda n, form: Written((date(1970, 1, 1) + timedelta(n)).strftime(form), n),
        days,
        st.sampled_from(FORMS),
    )
    named = [("männlich", 0), ("M", 0), ("m.", 0), ("weiblich", 1)]
    sex = [Written(*pair) for pair in [*named, ("", np.nan), ("null", np.nan), ("unbek.", np.nan)]]
    label = [Written(*pair) for pair in [("gesund", 0), ("krank", 1), ("ja", 1), ("Ja", 1)]]
    return st.tuples(age, stay, born, st.sampled_from(sex), st.sampled_from(label))


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, dict[str, str], list[tuple[Written, ...]]]:
    """A table as text, how it is written, and what its cells mean."""
    decimal = draw(st.sampled_from([".", ","]))
    delimiter = draw(st.sampled_from([",", ";", "\t", "|"]))
    encoding = draw(st.sampled_from(["utf-8", "cp1252", "utf-16"]))
    records = draw(st.lists(cells(decimal), min_size=4, max_size=8))
    # Both classes, more than once, and a number that shows the decimal sign.
    first = Written(number(31.5, decimal, False), 31.5)
    for label in (Written("gesund", 0), Written("krank", 1)) * 3:
        rest = [Written("5", 5), Written("1970-01-03", 2), Written("weiblich", 1)]
        records.append((first, *rest, label))
    blanks = st.sampled_from(["", "", " ", "  "])
    out = io.StringIO()
    writer = csv.writer(
        out, delimiter=delimiter, lineterminator=draw(st.sampled_from(["\n", "\r\n"]))
    )
    writer.writerow([draw(blanks) + name + draw(blanks) for name in (*COLUMNS, "ill")])
    for record in records:
        padded = [
            f"{draw(blanks)}{cell.text}{draw(blanks)}" if cell.text else "" for cell in record
        ]
        writer.writerow(padded)
    return (
        out.getvalue(),
        {"delimiter": delimiter, "encoding": encoding, "decimal": decimal},
        records,
    )


def expected(records: list[tuple[Written, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cells (N, 4) as numbers, features (N, 5) and labels (N,)."""
    cells = np.array([[cell.means for cell in record[:4]] for record in records], np.float32)
    numbers = np.where(np.isnan(cells[:, :3]), np.float32(FILL), cells[:, :3])
    one_hot = cells[:, 3:] == np.arange(2)
    labels = np.array([int(record[4].means) for record in records])
    return cells, np.concatenate([numbers, one_hot], axis=1).astype(np.float32), labels


def in_order(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    rows = np.column_stack([features, labels])
    return rows[np.lexsort(rows.T)]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(table=tables())
def test_six_readers_read_a_table_identically(tmp_path_factory, table):
    text, written, records = table
    folder = tmp_path_factory.mktemp("table")
    path = folder / "d.csv"
    path.write_bytes(text.encode(written["encoding"]))
    cells, features, labels = expected(records)

    data = {"source": "csv", "path": str(path), "label": "ill", "classes": CLASSES, **written}
    data |= {"categories": {"sex": SEXES}, "dates": {"born": FORMS}, "missing": FILL, "users": 1}
    data |= {
        "na_values": NA_STRINGS,
        "values": SPELLINGS,
        "preprocess": (),
        "partition": "similarity",
    }
    pool = read_pool(parse_data(data))
    np.testing.assert_array_equal(pool.features, features, "training in memory")
    np.testing.assert_array_equal(pool.labels, labels, "training in memory")

    stored = load_federation({"source": "saved", "path": str(prepare(data, folder / "stored"))})
    parts = [(part.features.numpy(), part.labels.numpy()) for part in (stored.train, stored.test)]
    streamed = [np.concatenate(column) for column in zip(*parts, strict=True)]
    np.testing.assert_array_equal(in_order(*streamed), in_order(features, labels), "data prepare")

    task = Logistic(5, 2)
    model = Model.of(stored, task, torch.linspace(-1, 1, task.parameters))
    parts = list(model.parts(path))
    found = np.concatenate([part.features for part in parts])
    assert all(part.complete.all() for part in parts)
    np.testing.assert_array_equal(found, features, "prediction")

    scored = score_rows(model, path, "ill", None)
    np.testing.assert_array_equal(scored.targets.numpy(), labels, "evaluation")
    torch.testing.assert_close(scored.scores, model.scores_of(features), rtol=0, atol=0)

    layer = model.to_module().stages[0]
    np.testing.assert_array_equal(layer(torch.from_numpy(cells)).numpy(), features, "module")

    rows = SchemaSettings(
        features=COLUMNS, categories={"sex": SEXES}, label="ill",
        classes=CLASSES, missing=FILL, na_values=NA_STRINGS, values=SPELLINGS,
        dates={"born": FORMS},
    )  # fmt: skip
    site = read_records({"source": "csv", "path": "d.csv", **written}, folder, rows)
    assert site.used.all(), site.notes
    np.testing.assert_array_equal(site.features.numpy(), features, "deployed site")
    np.testing.assert_array_equal(site.labels.numpy(), labels, "deployed site")


#: Cells as people and programs write them, right and wrong.
STRANGE = (
    "1",
    "-2.5",
    "+3",
    " 4 ",
    "\t5",
    "1e3",
    "1E-3",
    ".5",
    "5.",
    "1e999",
    "-1e999",
    "1e-60",
    "nan",
    "NaN",
    "NAN",
    "-nan",
    "nan(1)",
    "inf",
    "-Infinity",
    "NA",
    " NA",
    "null",
    "",
    " ",
    "-9",
    "-9.0",
    "-9.000000001",
    "0x10",
    "1,5",
    "1_0",
    "1 2",
    "\u00a07",
    "\u0661",
    "1e",
    "e5",
    ".",
    "16777217",
    "3.4028235e38",
    "3.4028236e38",
    "0.1000000014901161193847656250000001",
    "true",
    "m",
    " m",
    "f",
    "M",
    "unbek.",
    "ja",
    "nein",
    "no",
    "yes ",
    "\x85",
    "\u2028",
    "a\rb",
    "\0",
)
LINES = (
    b"",
    b" ",
    b",",
    b'"',
    b'"1","2","m","ja"',
    b'"1,"2,m,ja',
    b'1,"2\n3",m,ja',
    b"1,2,m",
    b'1,"",m,ja',
    b'1,"2""",m,ja',
    b'1,"2" ,m,ja',
    b'1,"a,b",m,"ja"',
    b"1,2,m,ja,5",
    b"1,2,m,ja\r",
    b"\xff,2,m,ja",
    b"1,2,\xc3,ja",
    b"\xef\xbb\xbf1,2,m,ja",
    b"1,2,m,ja\r\r",
    b"\xed\xa0\x80,1,m,ja",
    b"1,2,\x81,ja",
    b"," * 90,
    b"3,2,m,ja" + b" " * 99,
)


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, dict[str, str], bool]:
    """A file at a site with all that may be wrong in it, how it is declared, and whether there are
    NA strings of the site's own."""
    encoding = draw(st.sampled_from(["utf-8", "cp1252", "latin-1", "ascii"]))
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    fine = st.tuples(
        st.floats(-1e6, 1e6, width=32).map(str),
        st.sampled_from(["1", "2.5", "-3", "0.1", "7e-3", "NA", "", "-9"]),
        st.sampled_from(["m", "f", "x", ""]),
        st.sampled_from(["ja", "nein"]),
    )
    odd = st.tuples(*[st.sampled_from(STRANGE)] * 4)
    sign = draw(st.sampled_from(["", '"']))
    around = st.sampled_from(
        [("", ""), ("", ""), ("", ""), (sign, sign), (sign, ""), ("x" + sign, sign)]
    )
    written = st.tuples(st.one_of(fine, fine, fine, odd), st.tuples(*[around] * 4))
    rows = written.map(
        lambda row: ",".join(
            f"{left}{cell}{right}" for cell, (left, right) in zip(*row, strict=True)
        ).encode(encoding, errors="ignore")
    )
    lines = draw(st.lists(st.one_of(rows, rows, rows, rows, st.sampled_from(LINES)), max_size=40))
    header = draw(st.sampled_from([b"age,stay,sex,ill", b" age, stay ,sex,ill"]))
    header = b"\xef\xbb\xbf" + header if encoding == "utf-8" and draw(st.booleans()) else header
    text = end.join([header, *lines]) + draw(st.sampled_from([b"", end]))
    return text, {"encoding": encoding}, draw(st.booleans())


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(file=files(), size=st.sampled_from([40, 200, 1 << 24]))
def test_a_site_reads_blocks_of_lines_as_it_reads_lines(tmp_path_factory, file, size):
    """Arrow reads plain blocks, and every block may be read line by line: all that a site knows of
    its records is the same, to the last bit and the last word."""
    text, written, own = file
    folder = tmp_path_factory.mktemp("site")
    (folder / "d.csv").write_bytes(text)
    data = {"source": "csv", "path": "d.csv", **written}
    if own:
        data["na_values"] = {"stay": ["-9"]}
    rows = SchemaSettings(
        features=("age", "stay", "sex"), categories={"sex": ("f", "m")},
        label="ill", classes=("nein", "ja"), missing=FILL,
    )  # fmt: skip
    counted = rows.changed(classes=0, low=-5.0, high=5.0)
    for schema in (rows, counted):
        found = []
        for by_line in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lines_module, "_BLOCK_BYTES", size)
                patch.setattr(lines_module, "LONGEST", 100)
                if by_line:
                    patch.setattr(lines_module._Reader, "_by_arrow", lambda reader, block: None)
                    patch.setattr(lines_module, "_BLOCK_BYTES", 1 << 24)
                found.append(read_records(data, folder, schema))
        fast, slow = found
        for name in ("features", "labels", "used"):
            np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name), name)
        assert (fast.notes, fast.ranges) == (slow.notes, slow.ranges)


def test_arrow_reads_the_blocks_that_are_plain(tmp_path, monkeypatch):
    """The fast path is taken: a quote slows its own block and no other."""
    plain = "".join(f"{k},{k / 8},m,ja\n" for k in range(400))
    (tmp_path / "d.csv").write_text(
        f'age,stay,sex,ill\n{plain}1,2,"m","ja"\n1,"2"" ",m,ja\n{plain}'
    )
    monkeypatch.setattr(lines_module, "_BLOCK_BYTES", 1000)
    read, slow = [], lines_module._Reader._line_by_line
    monkeypatch.setattr(
        lines_module._Reader,
        "_line_by_line",
        lambda reader, lines: read.append(len(lines)) or slow(reader, lines),
    )
    rows = SchemaSettings(
        features=("age", "stay", "sex"), categories={"sex": ("f", "m")},
        label="ill", classes=("nein", "ja"),
    )  # fmt: skip
    site = read_records({"source": "csv", "path": "d.csv"}, tmp_path, rows)
    assert len(site) == 802 and int(site.used.sum()) == 801
    assert len(read) == 1 and read[0] < 100


@pytest.mark.parametrize("cell", ["nan(1)", "NaN(abc)"])
def test_a_cell_that_arrow_alone_takes_for_a_number(tmp_path, cell):
    """The codec does not: the record counts and contributes nothing, whoever reads the block."""
    (tmp_path / "d.csv").write_text(f"age,ill\n31,ja\n{cell},ja\n58,nein\n")
    rows = SchemaSettings(features=("age",), label="ill", classes=("nein", "ja"))
    site = read_records({"source": "csv", "path": "d.csv"}, tmp_path, rows)
    assert site.used.tolist() == [True, False, True], site.notes
