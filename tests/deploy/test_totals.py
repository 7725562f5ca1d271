"""The largest counts that sites have told a server: one that restores an old state is found out."""

from __future__ import annotations

import pytest
from refusals import refuses

pytest.importorskip("flwr")

from dpscaffold.deployment.transports.flower.serving import keep_totals, read_totals


def test_counts_only_ever_grow_over_all_runs(tmp_path):
    path = tmp_path / "totals.json"
    assert read_totals(path) == {}
    keep_totals(path, {"north": 3, "east": 1})
    keep_totals(path, {"north": 2, "south": 5})  # an old state, and a site of another run
    assert read_totals(path) == {"north": 3, "east": 1, "south": 5}


def test_nothing_is_written_where_nothing_is_new(tmp_path):
    path = tmp_path / "totals.json"
    keep_totals(path, {})
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"north": "many"}', '{"north": null}'])
def test_a_damaged_file_is_refused(tmp_path, text):
    path = tmp_path / "totals.json"
    path.write_text(text)
    with refuses("totals-damaged: totals.json"):
        keep_totals(path, {"north": 1})
    assert path.read_text() == text
