"""Exports as they are: other encodings, titles above the header, notes with line breaks, blanks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.config import parse
from dpscaffold.data import load_federation
from dpscaffold.data.config import parse_data
from dpscaffold.data.drafts.draft import draft
from dpscaffold.data.drafts.profile import look
from dpscaffold.data.loading import read_pool
from dpscaffold.data.sources.arrays import read_npz
from dpscaffold.data.tables.dialect import UNKNOWN, Dialect, TableFile, guess_encoding, table_files
from dpscaffold.data.tables.reader import column_names, read_batches
from dpscaffold.data.tables.rows import raw_parts

HEADER = "site;age;weight;ill"
SITES, ANSWERS = ("Bonn", "Köln"), ("nein", "ja", "ja")
ROWS = [f"{SITES[i % 2]};{20 + i % 40};{60 + i},5;{ANSWERS[i % 3]}" for i in range(60)]
ALL = {"source": "csv", "label": "ill", "encoding": "auto", "delimiter": "auto", "decimal": "auto"}


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def pool_of(path: Path, **keys: object):
    return read_pool(parse_data({**ALL, "path": str(path), "user": "site", **keys}))


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252"]
)
@pytest.mark.parametrize("above", ["", "# of March\n", "Export of March\n\nStand;2024\n"])
def test_what_stands_above_the_header_is_skipped_in_every_encoding(
    tmp_path: Path, encoding: str, above: str
) -> None:
    path = written(tmp_path / "a.csv", "\n".join([above + HEADER, *ROWS]) + "\n", encoding)
    pool = read_pool(parse_data(tomllib.loads(draft(look(path), 1.0))["data"]))
    assert pool.features.tolist() == [[20.0 + i % 40, 60.5 + i] for i in range(60)]
    assert pool.names == ("Bonn", "Köln")


def test_the_header_is_the_line_that_names_the_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "\n".join(["Export", "of;March", HEADER, *ROWS]))
    assert len(pool_of(path, delimiter=";").labels) == 60


def test_no_record_is_taken_for_the_header(tmp_path: Path) -> None:
    """A column that is missing is refused, even where a record holds its name."""
    path = written(tmp_path / "a.csv", "\n".join([HEADER, "site;ill;3;ja", *ROWS]))
    with refuses("unknown-column: 'ja'"):
        pool_of(path, label="ja", delimiter=";")


def test_a_header_that_leaves_columns_unnamed_is_none_the_less_the_header(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", ",x,ill\n" + "".join(f"{i},{i},{i % 2}\n" for i in range(9)))
    assert table_files(path, "csv", UNKNOWN)[0].dialect.header == 1
    path = written(tmp_path / "b.csv", "x,ill\n" + "".join(f"{i},{i % 2},\n" for i in range(9)))
    assert table_files(path, "csv", UNKNOWN)[0].dialect.header == 1


@pytest.mark.parametrize("dialect", [Dialect(), Dialect(header=2), Dialect(encoding="cp1252")])
def test_line_breaks_in_quotes_cross_every_border_between_batches(
    tmp_path: Path, dialect: Dialect
) -> None:
    notes = [f'{i},"seen\n# again {i}\n""q"", {"x" * 90}",a 5" tube\n' for i in range(30_000)]
    titles = "Export\n" * (dialect.header - 1)
    path = written(tmp_path / "a.csv", titles + "n,note,tube\n" + "".join(notes))
    file = TableFile(path, "csv", dialect)
    found = [
        row
        for batch in read_batches(file, [], ["n", "note"], column_names(file))
        for row in batch.to_pylist()
    ]
    assert [row["n"] for row in found] == [str(i) for i in range(30_000)]
    assert found[-1]["note"] == f'seen\n# again 29999\n"q", {"x" * 90}'


def test_the_line_of_a_fault_is_that_of_the_file(tmp_path: Path) -> None:
    lines = ["# export", "n,ill", *(f"{i},{i % 2}" for i in range(400_000)), "1,2,3"]
    file = TableFile(written(tmp_path / "a.csv", "\n".join(lines)), "csv", Dialect(header=2))
    with refuses(f"row-length-differs: (line {len(lines)})"):
        list(read_batches(file, [], ["n"], ["n", "ill"]))


@pytest.mark.parametrize("place", [0, 40])
def test_one_bad_byte_does_not_make_a_file_windows_1252(tmp_path: Path, place: int) -> None:
    """Read so, every Köln would be KÃ¶ln. A file that is Windows-1252 in more lines still is."""
    lines = ["town,ill", *(f"Köln,{i % 2}" for i in range(60))]
    good = [line.encode("utf-8") for line in lines]
    good[place] = good[place] + b" \xe9"
    (tmp_path / "a.csv").write_bytes(b"\n".join(good))
    with refuses(f"wrong-encoding: a.csv … line {place + 1}"):
        look(tmp_path / "a.csv")
    plain = [line.encode("cp1252") for line in lines]
    plain[place + 1] = b"Spa\xdf\x93,1"  # two letters whose bytes are UTF-8 by chance
    (tmp_path / "b.csv").write_bytes(b"\n".join(plain))
    assert guess_encoding(tmp_path / "b.csv") == "cp1252"


def test_letters_that_fit_no_encoding_are_refused_at_the_end_of_a_file_too(tmp_path: Path) -> None:
    text = "\n".join([HEADER, *ROWS]).encode("cp1252") + b"\nB\x81;1;2,5;ja\n"
    (tmp_path / "a.csv").write_bytes(text)
    with refuses("wrong-encoding: a.csv … 1252"):
        look(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_bytes("\n".join([HEADER, *ROWS]).encode("utf-16")[:-1])
    with refuses("wrong-encoding: b.csv"):
        pool_of(tmp_path / "b.csv")


def test_utf_16_that_is_taken_for_utf_8_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "\n".join(["site,age,ill", "a,1,0"]), "utf-16-le")
    with refuses("wrong-encoding: encoding = 'auto'"):
        load_federation({"source": "csv", "path": str(path), "label": "ill", "users": 2})


def test_names_of_columns_have_no_blanks_around_them_nor_line_breaks(tmp_path: Path) -> None:
    text = 'site ; "age" ;\tweight;ill \n' + "\n".join(ROWS)
    path = written(tmp_path / "a.csv", text)
    assert pool_of(path).features.tolist()[0] == [20.0, 60.5]
    broken = 'site;"age\r\n  in years";weight;ill\n' + "\n".join(ROWS)
    file = TableFile(written(tmp_path / "c.csv", broken), "csv", Dialect(delimiter=";"))
    assert column_names(file)[1] == "age in years"
    found = next(read_batches(file, [], ["age in years"], column_names(file)))
    assert found.column(0).to_pylist()[0] == "20"
    twice = written(tmp_path / "b.csv", "x, x,ill\n1,2,0\n")
    with refuses("duplicate-column: 'x'"):
        load_federation({"source": "csv", "path": str(twice), "label": "ill", "users": 2})


CELLS = st.text(st.sampled_from('ab "\n#,é'), max_size=8)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6))
def test_a_mended_file_reads_as_the_same_cells(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    quoted = ["n,a,b"]
    for n, (a, b) in enumerate(rows):
        cells = ['"' + cell.replace('"', '""') + '"' for cell in (a, b)]
        quoted.append(f"{n},{cells[0]},{cells[1]}")
    path = tmp_path_factory.mktemp("fixed") / "a.csv"
    written(path, "\n".join(quoted), "utf-16")
    file = TableFile(path, "csv", Dialect(encoding="utf-16"))
    read = [
        r for b in read_batches(file, [], ["n", "a", "b"], ["n", "a", "b"]) for r in b.to_pylist()
    ]
    assert [int(row["n"]) for row in read] == list(range(len(rows)))
    assert [(row["a"] or "", row["b"] or "") for row in read] == rows


def test_blanks_around_sites_classes_and_categories_do_not_count(tmp_path: Path) -> None:
    sites, wards, answers = ("Bonn", "Bonn ", " Köln", "Köln\u00a0"), ("a", "a "), ("ja", "nein ")
    rows = [f"{sites[i % 4]};{i};{wards[i % 2]};{answers[i % 2]}" for i in range(40)]
    path = written(tmp_path / "a.csv", "\n".join(["site;age;ward;ill", *rows, "  ;3;b;ja"]))
    pool = pool_of(path, categories=["ward"], missing={"*": "drop"})
    assert pool.names == ("Bonn", "Köln")
    assert pool.target.classes == ("ja", "nein")
    assert pool.features.shape == (40, 3)
    assert any("1 of 41 records lack a value" in note for note in pool.notes)
    coding = pool.preparation[0]
    assert coding(np.array([["7", "a  "]], dtype=object)).tolist() == [[7.0, 1.0, 0.0]]
    new = written(tmp_path / "new.csv", "age,ward\n7, a\n")
    (part,) = raw_parts(new, pool.preparation[:1], ())
    assert part.features.tolist() == [[7.0, 1.0, 0.0]]


def test_values_that_differ_in_how_they_are_written_are_pointed_out(tmp_path: Path) -> None:
    rows = [f"{('Bonn', 'BONN')[i % 2]};{i % 9};{('ja', 'Ja', 'nein')[i % 3]}" for i in range(30)]
    pool = pool_of(written(tmp_path / "a.csv", "\n".join(["site;age;ill", *rows])))
    said = [note for note in pool.notes if note.startswith("warning")]
    assert "column 'ill' holds 'Ja' and 'ja': each is a class of its own" in said[0]
    assert "2 names in column 'site' differ" in said[1]
    assert "Bonn" not in said[1] and "BONN" not in said[1]
    even = [row.replace("BONN", "Köln").replace("Ja", "ja") for row in rows]
    quiet = pool_of(written(tmp_path / "b.csv", "\n".join(["site;age;ill", *even])))
    assert not any(note.startswith("warning") for note in quiet.notes)


def test_numbers_that_are_none_are_missing_in_parquet_too(tmp_path: Path) -> None:
    table = pa.table(
        {
            "x": [1.5, float("nan"), *(float(i) for i in range(28))],
            "site": ["a", "b"] * 15,
            "ill": [0.0, float("nan"), *(float(i % 2) for i in range(28))],
        }
    )
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    found = {column.name: column for column in look(tmp_path / "a.parquet").columns}
    assert (found["x"].role, found["x"].missing) == ("number", True)
    read = read_pool(parse_data(tomllib.loads(draft(look(tmp_path / "a.parquet"), 1.0))["data"]))
    assert read.target.classes == ("0", "1")
    assert len(read.labels) == 29


def test_numbers_with_signs_between_thousands_are_no_identifier(tmp_path: Path) -> None:
    rows = [f"{SITES[i % 2]};{i + 1}.{i:03d},50;{ANSWERS[i % 3]}" for i in range(60)]
    path = written(tmp_path / "a.csv", "\n".join(["site;cost;ill", *rows]))
    (cost,) = (column for column in look(path).columns if column.name == "cost")
    assert cost.role == "number"
    quoted = path.read_text().replace(".", "'")
    (swiss,) = (c for c in look(written(tmp_path / "b.csv", quoted)).columns if c.name == "cost")
    assert swiss.role == "left out" and "thousands separator" in swiss.why


@pytest.mark.parametrize(
    ("form", "cell"),
    [
        ("%d-%b-%Y", "03-Jan-2024"),
        ("%d%b%Y", "03JAN2024"),
        ("%m/%d/%Y %I:%M %p", "1/23/2024 3:05 PM"),
        ("%Y-%m-%dT%H:%M:%S%z", "2024-01-03T12:30:00+01:00"),
    ],
)
def test_dates_with_names_of_months_halves_of_days_and_zones_are_found(
    tmp_path: Path, form: str, cell: str
) -> None:
    lines = ["site;seen;ill", *(f"{SITES[i % 2]};{cell};{i % 2}" for i in range(30))]
    lines[1] = lines[1].replace("2024", "2023")
    found = look(written(tmp_path / "a.csv", "\n".join(lines))).of("date")
    assert [column.forms for column in found] == [(form,)]


def test_columns_that_are_neither_numbers_nor_texts_are_left_out(tmp_path: Path) -> None:
    table = pa.table(
        {
            "x": [str(i % 7) for i in range(30)],
            "scan": [[1.0, 2.0]] * 30,
            "blob": [b"\xff"] * 30,
            "stay": pa.array(range(30), pa.duration("s")),
            "site": ["a", "b"] * 15,
            "ill": [True, False, False] * 10,
        }
    )
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    found = look(tmp_path / "a.parquet")
    assert {column.name for column in found.of("left out")} == {"scan", "blob", "stay"}
    read = read_pool(parse_data(tomllib.loads(draft(found, 1.0))["data"]))
    assert read.features[:8, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]


def test_a_text_among_the_numbers_of_parquet_is_named(tmp_path: Path) -> None:
    table = pa.table({"x": ["1", "2", "high"], "site": ["a", "b", "a"], "ill": [0, 1, 0]})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    keys = {"source": "parquet", "path": str(tmp_path / "a.parquet"), "label": "ill"}
    with refuses("not-numbers: 'x' … 'high'"):
        read_pool(parse_data({**keys, "user": "site"}))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (
            {"features": np.array([[1, None]] * 4), "labels": np.arange(4) % 2},
            "not-numbers: 'features'",
        ),
        ({"features": np.ones((4, 2)), "labels": np.arange(3) % 2}, "wrong-shape: a.npz"),
        ({"features": np.ones((4, 2)) + 1j, "labels": np.arange(4) % 2}, "not-numbers: a.npz"),
    ],
)
def test_arrays_that_cannot_be_trained_on_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], said: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with refuses(said):
        read_npz(tmp_path / "a.npz")


def test_a_step_size_by_formula_trains_several_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    held = rng.integers(0, 2, (400, 3))
    columns = {"x": rng.normal(size=400), **{f"l{j}": held[:, j] for j in range(3)}}
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = look(tmp_path / "a.parquet", "l0,l1,l2")
    settings = parse(tomllib.loads(draft(found, 1.0)))
    assert settings.plan.learning_rate is None
    assert 0 < settings.setting(load_federation(settings.data)).settled.learning_rate < 4


def test_a_file_that_is_no_table_is_refused_by_its_ending(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    with refuses("wrong-file-type: x.npy"):
        look(tmp_path / "x.npy")


def test_folders_of_a_partition_name_sites_as_they_are_and_nothing_as_missing(
    tmp_path: Path,
) -> None:
    sites = np.array(["St. Mary's/A", "Köln Süd", None], dtype=object)[np.arange(60) % 3]
    table = pa.table({"x": np.arange(60) % 7, "ill": np.arange(60) // 3 % 2, "site": sites})
    pa.parquet.write_to_dataset(table, tmp_path / "hive", partition_cols=["site"])
    keys = {"source": "parquet", "path": str(tmp_path / "hive"), "label": "ill", "user": "site"}
    with refuses("missing-value: 'site' … 20 of 60"):
        read_pool(parse_data(keys))
    pool = read_pool(parse_data({**keys, "missing": "drop"}))
    assert pool.names == ("Köln Süd", "St. Mary's/A")
    assert len(pool.labels) == 40


def test_a_note_among_the_tables_of_a_folder_is_not_called_empty(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        written(tmp_path / name, "\n".join([HEADER, *ROWS]))
    written(tmp_path / "notes.txt", "hello")
    with refuses("empty-file: notes.txt"):
        look(tmp_path)
