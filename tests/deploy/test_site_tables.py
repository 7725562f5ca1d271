"""How a site's file is written: delimiter, encoding, decimal sign and NA strings."""

from __future__ import annotations

import pytest
import torch
from deploy.world import TABLE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.deployment.site.reading import broken_lines, check_data_table, read_records

ROWS = TABLE.changed(categories={"sex": ("männlich", "weiblich")}, classes=("nein", "ja"))
GERMAN = {"source": "csv", "path": "d.csv", "delimiter": ";", "decimal": ",", "na_values": ["-9"]}
TEXT = (
    "id;sex ;ill;age;bmi\n1; männlich;ja ;31,5;1.020,25\n2;weiblich;nein;-9;20\n3;;ja;?;-9,0\n"
    "4;weiblich;ja;2.5;20\n"
)


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "latin-1", "utf-16", "utf-16-be"])
def test_a_site_declares_how_its_file_is_written(tmp_path, encoding):
    (tmp_path / "d.csv").write_bytes(TEXT.encode(encoding))
    table = GERMAN | {"encoding": encoding}
    found = read_records(table, tmp_path, ROWS)
    assert found.used.tolist() == [True, True, False, False]  # '?' and 2.5 are no numbers here
    assert found.features[:2].tolist() == [[31.5, 1020.25, 1, 0], [-1, 20, 0, 1]]
    assert found.labels.tolist() == [1, 0, 0, 0]
    assert broken_lines(table, tmp_path) == ()


def test_a_line_in_another_encoding_contributes_nothing(tmp_path):
    (tmp_path / "d.csv").write_bytes(TEXT.encode("cp1252"))
    found = read_records(GERMAN, tmp_path, ROWS)
    assert found.used.tolist() == [False, True, False, False]
    assert "not UTF-8: line 2" in found.notes[0][0]


def test_own_na_strings_are_added_to_those_of_the_offer(tmp_path):
    (tmp_path / "d.csv").write_text("sex,ill,age,bmi\nf,no,-9,-8\nf,no,-8,-9\n")
    table = {"source": "csv", "path": "d.csv", "na_values": {"bmi": ["-9"]}}
    rows = TABLE.changed(na_values=["-8"])
    found = read_records(table, tmp_path, rows)
    assert found.features.tolist() == [[-9, -1, 1, 0], [-1, -1, 1, 0]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"encoding": "auto"}, "auto-at-site: data.encoding is 'auto'"),
        ({"decimal": "auto"}, "auto-at-site: data.decimal is 'auto'"),
        ({"delimiter": "auto"}, "auto-at-site: data.delimiter is 'auto'"),
        ({"delimiter": ";;"}, "wrong-length: data.delimiter is ';;' … at most 1 character"),
        ({"encoding": "klingon"}, "unknown-encoding: data.encoding is 'klingon'"),
        ({"encoding": "utf-32"}, "encoding-not-supported: data.encoding is 'utf-32'"),
        ({"decimal": "'"}, "unknown-choice: data.decimal"),
        ({"na_values": [3]}, "not-text: na_values"),
    ],
)
def test_what_cannot_be_declared_is_refused(tmp_path, wrong, words):
    (tmp_path / "d.csv").write_text(TEXT)
    with refuses(words):
        check_data_table({"source": "csv", "path": "d.csv"} | wrong, tmp_path)


cells = st.sampled_from(
    ["männlich", "ja", "nein ", "31,5", "1.000,5", "-9", "", '"', "\ud83d", "x"]
)
dates = st.sampled_from(["31.12.2020", "31.02.2020", "2020-01-01 99:00:00", "0.0.0"])
DATED = ROWS.changed(
    features=("age", "sex", "bmi", "born"), dates={"born": ("%d.%m.%Y", "%Y-%m-%d")}
)
lines = st.lists(cells | dates, min_size=5, max_size=7).map(";".join)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(records=st.lists(lines, max_size=5), encoding=st.sampled_from(["utf-16-le", "cp1252"]))
def test_every_line_is_read_alone_whatever_the_encoding(tmp_path, records, encoding):
    """Also one with half a character: what it holds changes no other line."""
    errors = "surrogatepass" if encoding == "utf-16-le" else "replace"

    def read(some):
        text = "id;sex;ill;age;bmi;born\n" + "".join(f"{line}\n" for line in some)
        (tmp_path / "d.csv").write_bytes(text.encode(encoding, errors))
        return read_records(GERMAN | {"encoding": encoding}, tmp_path, DATED)

    found = read(records)
    assert len(found) == len(records)
    for k, record in enumerate(records):
        alone = read([record])
        assert torch.equal(found.features[k], alone.features[0])
        assert found.labels[k] == alone.labels[0] and found.used[k] == alone.used[0]
