"""Whatever is handed to a model: an answer that is right, or one sentence; never a wrong answer."""

from __future__ import annotations

import builtins
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_model import clinic

from dpscaffold import Logistic, Model, load_model
from dpscaffold.data.loading import load_federation
from dpscaffold.errors import BadInput
from dpscaffold.models import evaluate_files, predict_files


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored model of a table; the table itself is gone."""
    folder = tmp_path_factory.mktemp("abuse")
    options, rows = clinic(folder / "clinic.csv")
    data = load_federation({**options, "missing": "drop"})
    params = torch.linspace(-2, 2, 2 * (data.dimension + 1))
    Model.of(data, Logistic(data.dimension, 2), params).save(folder / "model")
    (folder / "rows.json").write_text(json.dumps(rows[:20]))
    (folder / "clinic.csv").unlink()
    return folder


def test_loading_runs_no_code_and_reads_its_own_folder_alone(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pickle, no torch.load, no exec; and the training table is gone already."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("code was loaded")

    opened: list[str] = []
    plain_open = builtins.open

    def watched(file: Any, *more: Any, **named: Any) -> Any:
        opened.append(str(file))
        return plain_open(file, *more, **named)

    load_model(stored / "model")  # what is imported late is imported by now
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(builtins, "open", watched)
    model = load_model(stored / "model")
    assert len(model.named(json.loads((stored / "rows.json").read_text()))) == 20
    assert all(name.startswith(str(stored)) for name in opened)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_folder_with_any_byte_changed_is_refused_or_the_same(
    stored: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One byte of one file, or its end, at random: the digests notice, whatever it was."""
    name = data.draw(st.sampled_from(["model.json", "model.safetensors", "privacy.json"]))
    content = bytearray((stored / "model" / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    folder = tmp_path_factory.mktemp("changed")
    for path in (stored / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / name).write_bytes(bytes(content))
    rows = json.loads((stored / "rows.json").read_text())
    try:
        found = load_model(folder).scores(rows)
    except BadInput as refused:
        assert "\n" not in str(refused)
    else:
        assert torch.equal(found, load_model(stored / "model").scores(rows))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_columns_are_found_by_name_whatever_their_order_company_and_type(
    stored: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Shuffled columns, further ones, numbers as text: files, frames and mappings agree."""
    model, rows = load_model(stored / "model"), json.loads((stored / "rows.json").read_text())
    wanted = model.scores(rows)
    extra = {"note": "x", "pressure2": "", "date": "2020-01-01"}
    rows = [{**row, **extra} for row in rows]
    order = data.draw(st.permutations(list(rows[0])))
    as_text = data.draw(st.booleans())
    shuffled = [{k: str(row[k]) if as_text else row[k] for k in order} for row in rows]
    torch.testing.assert_close(model.scores(shuffled), wanted)
    columns = {k: [row[k] for row in shuffled] for k in order}
    torch.testing.assert_close(model.scores(columns), wanted)
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    lines = [",".join(order), *(",".join(str(row[k]) for k in order) for row in shuffled)]
    path.write_text("\n".join(lines) + "\n")
    torch.testing.assert_close(model.scores(path), wanted)


CELLS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=3)
    | st.lists(st.integers(), max_size=2)
)
TABLES = (
    st.lists(st.dictionaries(st.sampled_from(["pressure", "ward", "rate", "x"]), CELLS), max_size=3)
    | st.dictionaries(
        st.sampled_from(["pressure", "ward", "rate"]), st.lists(CELLS, max_size=3), min_size=2
    )
    | st.lists(st.lists(CELLS, max_size=4), max_size=3)
    | CELLS
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=TABLES)
def test_any_rows_give_numbers_or_one_sentence(stored: Path, rows: Any) -> None:
    model = load_model(stored / "model")
    for ask in (model.predict, model.probabilities, model.named):
        try:
            found = ask(rows)
        except BadInput as refused:
            assert "\n" not in str(refused)
        else:
            assert len(found) >= 1
            if ask == model.probabilities:
                assert bool(torch.isfinite(found).all())
                torch.testing.assert_close(found.sum(1), torch.ones(len(found)))


LINES = st.lists(
    st.lists(st.text("ab,;\"'\n\t 019.-einf\x00é", max_size=5), min_size=1, max_size=5), max_size=5
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=LINES, head=st.booleans())
def test_any_file_gives_predictions_or_one_sentence(
    stored: Path, tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]], head: bool
) -> None:
    """A prediction for each row, empty where there is none; a refused file leaves nothing."""
    model, folder = load_model(stored / "model"), tmp_path_factory.mktemp("file")
    text = "\n".join([*(["pressure,ward,rate"] if head else []), *map(",".join, lines)])
    (folder / "rows.csv").write_text(text)
    for work in (
        lambda: predict_files(model, folder / "rows.csv", folder / "out.csv"),
        lambda: evaluate_files(model, folder / "rows.csv", "ward"),
        lambda: model.predict(folder / "rows.csv"),
    ):
        try:
            work()
        except BadInput as refused:
            assert "\n" not in str(refused).strip()
    assert not [path for path in folder.iterdir() if "partial" in path.name]
    if (folder / "out.csv").exists():
        for line in (folder / "out.csv").read_text().splitlines()[1:]:
            said, *chances = line.split(",")
            assert said in ('"well"', '"ill"', "") and chances.count("") == 2 * (said == "")
            assert not said or sum(map(float, chances)) == pytest.approx(1.0, abs=1e-5)
            assert not said or (said == '"ill"') == (float(chances[0]) >= float(chances[1]))


def test_rows_of_other_types_are_taken_as_what_they_say(stored: Path) -> None:
    """Integers, float64, text, NumPy scalars and categories of a frame mean the same."""
    model = load_model(stored / "model")
    one = {"pressure": 10_050.0, "ward": "a", "rate": 0.0}
    wanted = model.scores([one])
    for pressure in (10_050, "10050", "10050.0", np.float64(10_050), np.int32(10_050), b"10050"):
        torch.testing.assert_close(model.scores([{**one, "pressure": pressure}]), wanted)
    torch.testing.assert_close(model.scores([{**one, "ward": b"a"}]), wanted)
