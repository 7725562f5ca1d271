"""How a run ends: a verdict that tells useless models from useful ones, and advice that works when
it is followed."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from stated import summary_of
from typed import HOSPITALS, done_here

from dpscaffold import Federation, Gaussian, Logistic, Plan, fedavg, synthetic
from dpscaffold.config import make_run
from dpscaffold.data.drafts.draft import run_lines
from dpscaffold.federation.roster import FEW_USERS
from dpscaffold.privacy import Part, state
from dpscaffold.training.evaluator import baseline
from dpscaffold.training.verdict import cause, verdict

CONFIG = f"""{HOSPITALS}minimum_records = 5
[task]
kind = "logistic"
[algorithm]
name = "scaffold"
[plan]
rounds = 60
local_steps = 5
user_ratio = 0.25
averaging = "tail"
[privacy]
epsilon = 1
"""


@pytest.fixture
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight hospitals of 300 patients and one of 12, whose noise is that of batches of two."""
    rng = np.random.default_rng(0)
    lines = [",".join(["site", *"abcdefgh", "readmitted"])]
    for site, count in [*((f"s{k}", 300) for k in range(8)), ("lille", 12)]:
        x = rng.normal(size=(count, 8))
        true = x @ np.linspace(-1, 1, 8) + rng.logistic(size=count) > 1.0
        for row, ill in zip(x, true, strict=True):
            lines.append(",".join([site, *(f"{v:.3f}" for v in row), "ja" if ill else "nein"]))
    (tmp_path / "h.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "h1.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(*words: str) -> list[str]:
    done = done_here("train", "h1.toml", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_advice_works_when_it_is_followed(hospitals: Path) -> None:
    """Each --set that the console gives is taken, until the model is good: the noise falls."""
    lines = trained("--out", "runs/first")
    first = summary_of(Path("runs/first"))["final"]["test_auc"]
    assert len(lines) == 6 and "lille: 10 records, 24 times" in lines[2] and "same ε" in lines[2]
    advice = shlex.split(lines[2].partition("same ε: ")[2])
    assert "plan.weighting=records" in advice
    again = trained("--out", "runs/again", *advice)
    second = summary_of(Path("runs/again"))["final"]["test_auc"]
    assert second > first + 0.05 and second > 0.8
    assert 5 <= len(again) <= 6 and 'quality  better than always answering "nein"' in again[1]
    stored = str(summary_of(hospitals / "runs" / "first"))
    assert "lille" not in stored and "verdict" in stored


def test_advice_and_drafts_agree_on_how_many_sites_may_all_take_part() -> None:
    """A draft lets 150 sites take part in every round, so a run of a quarter of them is warned."""
    for users, all_of_them in ((150, True), (FEW_USERS, True), (FEW_USERS + 1, False)):
        data = synthetic(users=users, records=20)
        plan = Plan(rounds=4, local_steps=1, user_ratio=0.1)
        setting = make_run(data.roster, Logistic(40, 10), fedavg(), plan, Gaussian(noise=20.0))
        advice = cause(setting, state([Part(setting.describe(), 4)]), overshoots=False)
        assert ("--set plan.user_ratio=1" in advice) is all_of_them, advice
        drafted = run_lines(dict.fromkeys(data.names, 20), "class", 1.0, 1, epsilon=2.0)
        assert any(line.startswith("user_ratio = 1 ") for line in drafted) is all_of_them


@pytest.mark.parametrize(("kind", "classes"), [("class", 2), ("class", 3), ("number", 0)])
@pytest.mark.parametrize("useful", [True, False])
def test_a_useless_model_is_told_from_a_useful_one(kind: str, classes: int, useful: bool) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 3)).astype(np.float32)
    signal = x[:, 0] if useful else rng.normal(size=600)
    y = signal + 0.3 * rng.normal(size=600)
    labels = np.digitize(y, np.linspace(-0.5, 0.5, classes - 1)) if classes else y
    halves = [[(x[:300], labels[:300])], [(x[300:], labels[300:])]]
    data = Federation.from_arrays(*halves, target=kind)  # type: ignore[arg-type]
    x_, y_ = data.test.features, data.test.labels.double()
    wanted = x_[:, 0].double()
    edges = np.linspace(-0.5, 0.5, classes - 1) if classes else np.zeros(1)
    final = {
        "test_auc": _auc(wanted.numpy(), (y_ == 1).numpy()) if classes == 2 else None,
        "test_accuracy": float((np.digitize(wanted, edges) == y_.numpy()).mean()),
        "test_r2": float(1 - (wanted - y_).square().mean() / y_.var()),
    }
    found = verdict(data, final, baseline(data))
    assert found is not None and found.better == ("yes" if useful else "no")
    assert found.sentence.startswith("better than always" if useful else "no better than always")


def _auc(score: np.ndarray, true: np.ndarray) -> float:
    """By its definition: pairs in the right order."""
    return float((score[true][:, None] > score[~true][None]).mean())
