"""Numbers that mean missing at deployed sites: agreed on in the offer, read alike, kept by the
model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from deploy.world import TABLE

from dpscaffold import Model
from dpscaffold.deployment.protocol.agreement import Offer, SchemaSettings, read_offer
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.server.agreed import model_of, setting_of
from dpscaffold.deployment.site.reading import read_records
from dpscaffold.engine import State

MARKED = TABLE.changed(na_values={"age": ["-9", "?"], "sex": ["?"]})
TEXT = "id,sex,ill,age,bmi\n1,?,no,-9.0,-9\n2,f,yes,?,30\n3,m,yes,9,30\n"
READ = [[-1, -9, 0, 0], [-1, 30, 1, 0], [9, 30, 0, 1]]


def offered(rows: SchemaSettings) -> Offer:
    tables: dict[str, Any] = {"task": {"kind": "logistic"}, "algorithm": {"name": "fedavg"}}
    tables["plan"] = {"rounds": 2, "user_ratio": 1.0, "learning_rate": 0.5}
    return Offer(rows=rows, **tables)  # type: ignore[arg-type]


def model_of_offer(rows: SchemaSettings) -> Model:
    """The model with which a run begins that was offered for such rows."""
    offer = offered(rows)
    setting = setting_of(offer, EnrolledRun("", {}, ("north",), "", (30,), True))
    return model_of(offer.rows, setting, State.initial(setting, torch.device("cpu")), None)


def test_they_are_missing_by_value_in_the_columns_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(TEXT)
    found = read_records({"source": "csv", "path": "d.csv"}, tmp_path, MARKED)
    assert found.features.tolist() == READ and found.used.all()
    assert ("d.csv: 2 of 3 values of 'age' are missing, and read as -1", True) in found.notes
    single = {"id": [1, 2], "sex": ["f", "m"], "ill": ["no", "yes"], "bmi": [1.0, 2.0]}
    table = pa.table(single | {"age": pa.array([0.1, 3.0], pa.float32())})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    rows = TABLE.changed(na_values={"age": ["0.1"]})
    found = read_records({"source": "parquet", "path": "d.parquet"}, tmp_path, rows)
    assert found.features[:, 0].tolist() == [-1, 3]


def test_the_model_of_the_run_reads_new_rows_as_the_sites_did(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(TEXT)
    (part,) = model_of_offer(MARKED).parts(tmp_path / "d.csv", ["ill"])
    assert part.complete.all() and part.features.tolist() == READ


def test_an_offer_names_them_only_where_there_are_any() -> None:
    """Without them it is, to the digest, what it was before there was such a key."""
    assert "na_values" not in offered(TABLE).to_dict()["rows"]  # type: ignore[operator]
    assert offered(MARKED).to_dict()["rows"]["na_values"]["age"] == ["-9", "?"]  # type: ignore
    for rows in (TABLE, MARKED, TABLE.changed(na_values=["?", "-9"])):
        assert read_offer(offered(rows).to_dict()) == offered(rows)


@pytest.mark.parametrize(
    ("na_values", "said"),
    [
        ({"aeg": ["?"]}, "schema.na_values names 'aeg', which is not among the columns"),
        ([-9], "na_values holds -9, which is no text"),
        (["m"], "na_values names 'm', which is a category of column 'sex'"),
        (["yes"], "na_values names 'yes', which is a class of column 'ill'"),
    ],
)
def test_bad_ones_are_one_sentence(na_values: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TABLE.changed(na_values=na_values)


def test_blanks_around_texts_do_not_count_at_a_site_nor_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("sex,ill,age,bmi\nf , yes,50,20\n m,no , 60,30\n")
    found = read_records({"source": "csv", "path": "d.csv"}, tmp_path, TABLE)
    assert found.features.tolist() == [[50, 20, 1, 0], [60, 30, 0, 1]]
    assert found.labels.tolist() == [1, 0]
    (part,) = model_of_offer(TABLE).parts(tmp_path / "d.csv", [])
    assert torch.equal(torch.as_tensor(part.features), found.features)
