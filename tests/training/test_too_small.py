"""Ways in which a stated ε could be too small, each with what is stated instead."""

from __future__ import annotations

import re

import pytest
import torch
from refusals import refuses
from small import federation
from stated import over_draw, stated
from typer.testing import CliRunner

from dpscaffold import Gaussian, Logistic, Plan, fedavg, scaffold, train
from dpscaffold.cli import app
from dpscaffold.config import make_run
from dpscaffold.errors import Diverged
from dpscaffold.federation.roster import Roster
from dpscaffold.privacy.preparation import COUNTED

PLAN = Plan(rounds=6, local_steps=2, user_ratio=0.5, data_ratio=0.5, checkpoint_every=2)


def test_a_run_that_diverged_states_its_planned_rounds(tmp_path):
    """Its outputs decided how many rounds were run, so the rounds that were run say too little."""
    wild = PLAN.changed(learning_rate=1e30, regularisation=1.0)
    with pytest.raises(Diverged, match="all 6 planned rounds are counted"):
        train(federation(), Logistic(4, 3), fedavg(), wild, Gaussian(noise=4.0), out=tmp_path / "r")
    said = stated(tmp_path / "r")
    assert said.rounds == 6
    assert said.towards("server").epsilon == pytest.approx(over_draw(said.run, 6))


def test_a_run_that_was_stopped_counts_the_rounds_it_ran(tmp_path):
    """Not those that are to come: with secret noise they would count twice when it goes on."""
    import signal

    def stop(row):
        if row.round == 3:
            signal.raise_signal(signal.SIGTERM)

    def go(**more):
        privacy = Gaussian(noise=4.0, secret=True)
        return train(
            federation(), Logistic(4, 3), fedavg(), PLAN, privacy, out=tmp_path / "run",
            resume=True, **more,
        )  # fmt: skip

    first = go(on_round=stop)
    assert first.ended == "interrupted" and stated(tmp_path / "run").rounds == 3
    whole = go()
    assert whole.ended == "completed" and whole.privacy.rounds == 6
    assert whole.privacy.towards("server").epsilon == pytest.approx(over_draw(whole.privacy.run, 6))


def test_a_step_size_does_not_tell_sizes_that_are_hidden():
    """With a user as unit R_i is private, and η₀ is no function of it."""
    private = Gaussian(noise=4.0, unit="user")
    rates = {
        make_run(Roster(sizes, (), federation().roster.schema, "t"), Logistic(4, 3), fedavg(), Plan(
            rounds=3, local_steps=2, user_ratio=1.0), private).settled.learning_rate
        for sizes in ((30, 40, 50), (9, 700, 20))
    }  # fmt: skip
    assert len(rates) == 1


SIZES = (7919, 6007, 5003, 4001)
NUMBERS = {*SIZES, *(size // 2 for size in SIZES), sum(SIZES)}
#: A digest of what is drawn again each time holds any four digits now and then.
DIGEST = re.compile(r"\b[0-9a-f]{32,}\b")


def numbers_in(value):
    """All integers in a checkpoint, tensors included."""
    if isinstance(value, dict):
        return set().union(*(numbers_in(v) for pair in value.items() for v in pair))
    if isinstance(value, list | tuple):
        return set().union(*map(numbers_in, value))
    if isinstance(value, torch.Tensor):
        flat = value.flatten().double()
        return {int(x) for x in flat.tolist() if x == int(x)} if flat.isfinite().all() else set()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {int(value)} if value == int(value) else set()
    return set(map(int, re.findall(r"\d+", value))) if isinstance(value, str) else set()


@pytest.mark.parametrize("unit", ["user", "record"])
def test_nothing_that_is_written_tells_the_size_of_a_user(tmp_path, unit):
    """Every byte of a run folder, its report and its model card, searched for R_i, b_i and their
    sum. With a record as unit rates are told, so the search does find something."""
    folder = tmp_path / "run"
    privacy = Gaussian(noise=4.0, unit=unit, secret=True)
    train(federation(SIZES), Logistic(4, 3), scaffold(), PLAN, privacy, out=folder)
    page = tmp_path / "report.html"
    made = CliRunner().invoke(app, ["report", str(folder), "--out", str(page)])
    assert made.exit_code == 0, made.output
    answers = [
        CliRunner().invoke(app, [*words, str(folder)]).output
        for words in (["privacy"], ["privacy", "--json"], ["compare", "--json"])
    ]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    files = [path for path in files if path.name != ".lock"]  # the number of a process
    texts = {str(path): path.read_bytes().decode("latin-1") for path in files}
    texts |= {str(k): answer for k, answer in enumerate(answers)}
    found = {
        (name, number)
        for name, text in texts.items()
        for number in NUMBERS
        if re.search(rf"(?<![\d.]){number}(?![\d.]\d)(?!\d)", DIGEST.sub("", text))
    }
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    kept = {number for number in NUMBERS if number in numbers_in(saved)}
    if unit == "user":
        assert not found and not kept
    else:
        assert any("ledger.jsonl" in name for name, _ in found)


def test_users_chosen_by_their_sizes_where_sizes_are_hidden(tmp_path):
    """Replace a user's data by fewer records than the minimum and M changes: no ε covers that."""
    from dpscaffold.data import load_federation

    rows = [f"{x},{x % 2},u{x % 4}" for x in range(80)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,label,user", *rows]) + "\n")
    tables = {"source": "csv", "path": str(tmp_path / "rows.csv"), "label": "label"}
    tables |= {"user": "user", "minimum_records": 5, "classes": ["0", "1"], "preprocess": []}
    data = load_federation(tables)
    found = {}
    for unit in ("record", "user"):
        privacy = Gaussian(noise=4.0, unit=unit)
        folder = tmp_path / unit
        said = train(data, Logistic(1, 2), fedavg(), PLAN, privacy, out=folder).privacy
        found[unit] = [line for _, line in said.outside if line == COUNTED]
        assert stated(folder).outside == said.outside
    assert len(found["user"]) == 1 and not found["record"]
    with refuses("release-refused"):
        privacy = Gaussian(noise=4.0, unit="user", release=True)
        train(data, Logistic(1, 2), fedavg(), PLAN, privacy, out=tmp_path / "no")
    privacy = Gaussian(noise=4.0, release=True)
    train(data, Logistic(1, 2), fedavg(), PLAN, privacy, out=tmp_path / "release")
