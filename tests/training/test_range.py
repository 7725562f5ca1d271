"""Numbers with a public range: trained on [-1, 1], evaluated and given out in their own units."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from stated import summary_of
from typer.testing import CliRunner

from dpscaffold import Gaussian, Linear, Plan, fedavg, load_model, train
from dpscaffold.cli import app
from dpscaffold.config import make_run
from dpscaffold.data import FederationWriter, from_users, load, load_federation, prepare
from dpscaffold.data.drafts.guesses import rounded_range
from dpscaffold.data.drafts.profile import look
from dpscaffold.deployment.protocol.agreement import Offer, SchemaSettings
from dpscaffold.deployment.server.agreed import evaluation_on
from dpscaffold.federation import Federation, Target
from dpscaffold.tasks import LOSSES
from dpscaffold.tasks.metrics import METRICS
from dpscaffold.training.stack import Outcome
from dpscaffold.training.stopping import Stopping
from dpscaffold.tuning.private_scores import ScoreRule, record_sums

LOW, HIGH = 300.0, 650.0


def scores(path: Path, rows: int = 600, seed: int = 3) -> np.ndarray:
    """A table of school scores near 480, linear in two columns; gives back the scores."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2))
    y = np.round(480 + 40 * x[:, 0] - 20 * x[:, 1] + 10 * rng.normal(size=rows))
    rows_of = enumerate(zip(x, y, strict=True))
    lines = [f"s{i % 6},{a:.5f},{b:.5f},{v:.0f}" for i, ((a, b), v) in rows_of]
    path.write_text("\n".join(["school,iq,ses,score", *lines]) + "\n")
    return y


def settings(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "source": "csv",
        "path": str(path),
        "label": "score",
        "user": "school",
        "target": {"kind": "number", "low": LOW, "high": HIGH},
        "preprocess": ["standardise"],
        **more,
    }


CONFIG = """
[data]
source = "csv"
path = "scores.csv"
label = "score"
user = "school"
target = { kind = "number", low = 300, high = 650 }
preprocess = ["standardise"]
[task]
kind = "linear"
[algorithm]
name = "fedavg"
[plan]
rounds = 30
local_steps = 5
user_ratio = 1.0
data_ratio = 0.5
learning_rate = 0.2
[privacy]
noise = 0.2
clip = 1.0
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run whose target has a range."""
    folder = tmp_path_factory.mktemp("ranged")
    scores(folder / "scores.csv")
    text = CONFIG.replace("scores.csv", (folder / "scores.csv").as_posix())
    (folder / "c.toml").write_text(text)
    words = ["train", str(folder / "c.toml"), "--out", str(folder / "run"), "-q"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    return folder


def test_training_labels_are_clipped_to_the_range_and_test_labels_are_not(tmp_path: Path) -> None:
    """A test label beyond the range stays what it is: cutting it would flatter the model."""
    true = scores(tmp_path / "s.csv")
    narrow = {"kind": "number", "low": 440, "high": 520}
    made = load_federation(settings(tmp_path / "s.csv", target=narrow))
    assert float(made.train.labels.abs().max()) == 1.0 < float(made.test.labels.abs().max())
    own = made.target.restored(torch.cat([made.train.labels, made.test.labels])).numpy()
    beyond = (own < 440) | (own > 520)
    assert set(np.round(own[beyond])) <= set(true) and beyond[: len(made.train)].sum() == 0
    inside = np.sort(np.round(own[(own > 440) & (own < 520)]))
    assert np.array_equal(inside, np.sort(true[(true > 440) & (true < 520)]))


@pytest.mark.parametrize("how", ["prepared", "arrays", "users", "writer"])
def test_every_way_to_a_federation_maps_the_labels_alike(tmp_path: Path, how: str) -> None:
    target = Target("number", low=0, high=60)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 2)), rng.uniform(-10, 70, size=40)
    if how == "prepared":
        scores(tmp_path / "s.csv")
        kept = load(prepare(settings(tmp_path / "s.csv"), tmp_path / "kept"))
        read = load_federation(settings(tmp_path / "s.csv"))
        assert kept.target == read.target and kept.digest().value == read.digest().value
        assert json.loads((tmp_path / "kept" / "federation.json").read_text())["format"] == 3
        return
    if how == "arrays":
        made = Federation.from_arrays([(x, y)], [(x, y)], target=target)
    elif how == "users":
        made = from_users([(x, y), (x, y)], target=target)
    else:
        with FederationWriter(tmp_path / "w", target) as writer:
            writer.append((x, y), (x, y))
        made = load(tmp_path / "w")
    assert made.target == target
    wanted = np.clip((y.astype(np.float32) - 30) / 30, -1, 1)
    assert set(made.train.labels.tolist()) <= set(wanted.astype(np.float32).tolist())
    assert float(made.test.labels.abs().max()) > 1


def test_metrics_are_in_the_units_of_the_label(ran: Path) -> None:
    """Of the run, of evaluate, of the report's model: all from predictions in points."""
    federation = load_federation(settings(ran / "scores.csv"))
    model = load_model(ran / "run")
    truth = federation.target.restored(federation.test.labels).numpy()
    guess = model.predict(federation.test.features, prepared=True).numpy()
    final = summary_of(ran / "run")["final"]
    assert final["test_r2"] == pytest.approx(r2_score(truth, guess), abs=1e-5)
    assert final["test_r2"] > 0.8 and 380 < guess.mean() < 580
    assert final["test_rmse"] == pytest.approx(mean_squared_error(truth, guess) ** 0.5, rel=1e-5)
    assert final["test_mae"] == pytest.approx(mean_absolute_error(truth, guess), rel=1e-5)
    summary = summary_of(ran / "run")
    spread = np.sqrt(
        np.mean((truth - federation.target.restored(federation.train.labels).numpy().mean()) ** 2)
    )
    assert summary["baseline_test_rmse"] == pytest.approx(spread, rel=1e-5)
    for more in ([], [str(ran / "scores.csv")]):
        answer = CliRunner().invoke(app, ["evaluate", str(ran / "run"), *more, "--json"])
        assert answer.exit_code == 0, answer.output
        found = json.loads(answer.output)["metrics"]
        assert found["test_r2"] > 0.8 and 5 < found["test_rmse"] < 30


def test_predict_and_exports_give_out_points(ran: Path, tmp_path: Path) -> None:
    model = load_model(ran / "run")
    assert model.target == Target("number", low=LOW, high=HIGH)
    out = tmp_path / "p.csv"
    words = ["predict", str(ran / "run"), str(ran / "scores.csv"), "--out", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 0
    with out.open() as stream:
        said = [float(row["prediction"]) for row in csv.DictReader(stream)]
    with (ran / "scores.csv").open() as stream:
        rows = [[float(row["iq"]), float(row["ses"])] for row in csv.DictReader(stream)]
    raw = np.float32(rows)
    np.testing.assert_allclose(model.predict(raw).numpy(), said, rtol=1e-5)
    np.testing.assert_allclose(model.scores(raw)[:, 0].numpy(), said, rtol=1e-5)
    module = model.to_module()
    np.testing.assert_allclose(
        module(torch.from_numpy(raw))[:, 0].detach().numpy(), said, rtol=1e-4
    )
    # Far away from all records: at the ends of the range, and not beyond.
    far = model.predict(np.float32([[1e4, 0], [-1e4, 0]])).tolist()
    assert far == [HIGH, LOW] == module(torch.tensor([[1e4, 0], [-1e4, 0]]))[:, 0].tolist()
    program = tmp_path / "m.pt2"
    words = ["export", str(ran / "run"), "--to", "torch", "--out", str(program)]
    assert CliRunner().invoke(app, words).exit_code == 0
    again = torch.export.load(program).module()(torch.from_numpy(raw))
    np.testing.assert_allclose(again[:, 0].detach().numpy(), said, rtol=1e-4)


def test_a_range_is_what_scaling_by_hand_does() -> None:
    """The same run as on labels that somebody scaled, bit for bit in what is learnt."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 3)).astype(np.float32)
    y = (480 + 40 * x[:, 0]).astype(np.float32)
    hand = ((y - 475) / 175).clip(-1, 1)
    plan = Plan(rounds=4, local_steps=3, user_ratio=1.0, data_ratio=0.5)
    task, mechanism = Linear(3, 1, LOSSES["squared"]), Gaussian(clip=1.0, noise=2.0)
    ranged, scaled = (
        train(
            Federation.from_arrays([(x, label)], [(x, label)], target=target),
            task,
            fedavg(),
            plan,
            mechanism,
        )
        for label, target in ((y, Target("number", low=LOW, high=HIGH)), (hand, "number"))
    )
    torch.testing.assert_close(ranged.params, scaled.params)
    assert ranged.final["test_rmse"] == pytest.approx(175 * scaled.final["test_rmse"], rel=1e-3)
    assert ranged.final["train_loss"] == pytest.approx(scaled.final["train_loss"], rel=1e-5)


def test_public_records_of_a_server_are_judged_in_points() -> None:
    """A score of 0.5 represents 45 points; the truths are 45 and 30."""
    offer = Offer.model_validate(
        {
            "rows": {"features": 1, "classes": 0, "low": 0.0, "high": 60.0},
            "task": {"kind": "linear"},
            "algorithm": {"name": "fedavg"},
            "plan": {"learning_rate": 0.5},
        }
    )
    score = evaluation_on(offer, torch.zeros(2, 1), torch.tensor([0.5, 0.0]))
    found = score(torch.tensor([0.0, 0.5]))
    assert found["test_rmse"] == pytest.approx((15**2 / 2) ** 0.5)
    assert found["test_loss"] == pytest.approx(0.0625)


def test_stopping_compares_public_rows_in_points(ran: Path, tmp_path: Path) -> None:
    model = load_model(ran / "run")
    rows = np.float32([[0.0, 0.0], [1.0, -1.0]])
    said = model.predict(rows).tolist()
    public = tmp_path / "public.csv"
    public.write_text(f"iq,ses,score\n0,0,{said[0] + 3}\n1,-1,{said[1] + 4}\n")
    wrong = Stopping(public, "score").value(model)
    assert wrong == pytest.approx(-(((9 + 16) / 2) ** 0.5), rel=1e-3)


def test_private_tuning_bounds_errors_in_points() -> None:
    """tune.score_bound is the most that a record may be wrong, in the label's own units."""
    target = Target("number", low=0, high=60)
    table = Federation.from_arrays(
        [(np.zeros((2, 1)), np.array([45.0, 30.0]))],
        [(np.zeros((2, 1)), np.array([45.0, 30.0]))],
        target=target,
    )
    task = Linear(1, 1, LOSSES["squared"])
    plan = Plan(rounds=1, local_steps=1, user_ratio=1.0, data_ratio=1.0)
    setting = make_run(table.roster, task, fedavg(), plan)
    outcome = Outcome(setting, model=torch.tensor([0.0, 0.5]))
    sums, sizes = record_sums(outcome, table.test, ScoreRule(METRICS["mae"], bound=10.0))
    assert sums.tolist() == [10.0] and sizes.tolist() == [2.0]


def test_sites_are_told_the_range_and_offers_without_one_stay_as_they_were() -> None:
    rows = SchemaSettings(features=("a", "b"), classes=0, label="y", low=0.0, high=60.0)
    assert rows.target == Target("number", low=0, high=60)
    assert {"low", "high"} <= set(rows.model_dump())
    offer = Offer.model_validate(
        {
            "rows": {"features": 2, "classes": 2},
            "task": {},
            "algorithm": {"name": "fedavg"},
            "plan": {"learning_rate": 0.5},
        }
    )
    assert not {"low", "high"} & set(offer.to_dict()["rows"])


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("number", "no-target-range: data.target … low = 0 … high = 60"),
        ({"kind": "number"}, "missing-key: target.low"),
        ({"kind": "number", "low": 3}, "missing-key: target.high"),
        ({"kind": "number", "low": 3, "high": 3}, "bad-range"),
        ({"kind": "number", "low": 3, "high": float("inf")}, "not-a-number: target.high"),
        ({"kind": "class", "low": 3, "high": 4}, "not-applicable: 'class'"),
        ({"low": 3, "high": 4}, "not-applicable"),
        ({"kind": "number", "low": 3, "high": 9, "top": 1}, "unknown-key: target.top"),
    ],
)
def test_a_number_without_a_range_is_refused_before_a_record_is_read(
    tmp_path: Path, target: Any, said: str
) -> None:
    """The file does not exist: nothing of it decides."""
    with refuses(said) as caught:
        load_federation(settings(tmp_path / "nowhere.csv", target=target))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"classes": 0}, "give the range that it can have"),
        ({"classes": 0, "low": 1.0, "high": 0.0}, "low below high"),
        ({"classes": 0, "low": 1.0}, "give the range"),
        ({"classes": 2, "low": 0.0, "high": 1.0}, "schema.low and schema.high are the range of"),
    ],
)
def test_a_schema_of_a_number_needs_a_range(more: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        SchemaSettings(features=("a",), label="y", **more)


def test_targets_check_their_range() -> None:
    for made, said in (
        (lambda: Target("class", ("a", "b"), 0, 1), "not-applicable"),
        (lambda: Target("number", low=1), "no-target-range"),
        (lambda: Target("number", low=2, high=1), "bad-range"),
        (lambda: Target("number", low=0, high=float("nan")), "bad-range"),
    ):
        with refuses(said):
            made()
    assert Target.from_dict(Target("number", low=0, high=9).to_dict()).high == 9


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([9, 58], (0, 60)),
        ([320, 626], (300, 650)),
        ([0.013, 0.97], (0, 1)),
        ([-3.2, 3.1], (-4, 4)),
        ([36.1, 41.7], (36, 42)),
        ([5, 5], (5, 10)),
        ([0, 0], (0, 1)),
        ([1900, 2020], (1900, 2020)),
        ([-1e-7, 3e-7], (-1e-7, 3e-7)),
    ],
)
def test_ranges_are_guessed_in_round_numbers(values: list[float], wanted: Any) -> None:
    low, high = rounded_range(np.array(values))
    assert (low, high) == pytest.approx(wanted) and low <= min(values) and high >= max(values)


def test_init_takes_many_whole_numbers_for_a_number_and_asks(tmp_path: Path, monkeypatch) -> None:
    """Whole scores were taken for as many classes."""
    monkeypatch.chdir(tmp_path)
    scores(tmp_path / "scores.csv")
    words = ["init", "scores.csv", "--label", "score", "--user", "school"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    told = " ".join(answer.output.split())
    assert "guessed from the data" in told and "low" in told
    text = Path("scores.toml").read_text()
    assert 'target = { kind = "number", low = 300, high = 650 }' in text
    assert "If its values are" in text and 'kind = "linear"' in text
    few = [f"s{i % 6},{i},{i % 20}" for i in range(200)]
    Path("few.csv").write_text("\n".join(["school,iq,score", *few]) + "\n")
    assert look(Path("few.csv"), "score").target.kind == "class"
    halves = [f"s{i % 6},{i},{i % 5 / 2}" for i in range(200)]
    Path("halves.csv").write_text("\n".join(["school,iq,score", *halves]) + "\n")
    assert look(Path("halves.csv"), "score").target.kind == "number"
