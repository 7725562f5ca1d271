"""What ``init`` drafts trains well: held to a distance from training without privacy on all
records, on tables that no choice was made on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from typer.testing import CliRunner

from dpscaffold import Federation, Model, load_model
from dpscaffold.cli import app
from dpscaffold.config import load
from dpscaffold.data import load_federation


def wards(path: Path) -> None:
    """Eleven sites of 30 to 500 records and one of 12, two measurements and a category."""
    rng = np.random.default_rng(8)
    lines = ["site,age,dose,ward,ill"]
    for site, count in enumerate((500, 420, 380, 300, 260, 220, 180, 120, 80, 50, 30, 12)):
        age, dose = rng.normal(50 + 3 * rng.normal(), 12, count), rng.gamma(2, 2, count)
        ward = rng.integers(0, 3, count)
        score = 0.06 * (age - 50) + 0.3 * (dose - 4) + np.array([0, 0.6, -0.6])[ward] - 0.8
        ill = rng.random(count) < 1 / (1 + np.exp(-score))
        lines += [
            f"s{site},{a:.1f},{d:.2f},{'abc'[w]},{'yes' if i else 'no'}"
            for a, d, w, i in zip(age, dose, ward, ill, strict=True)
        ]
    path.write_text("\n".join(lines) + "\n")


def drafted(table: Callable[[Path], None], *named: str) -> tuple[Model, Federation]:
    """The model of both commands, with the records that it was trained and is evaluated on."""
    table(Path("table.csv"))
    repeatable = ["--set", "privacy.secret=false"]
    for words in (
        ["init", "table.csv", *named, "--epsilon", "2"],
        ["train", "table.toml", *repeatable],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (done.output, done.exception)
    federation = load_federation(load(Path("runs/table/config.toml")).data)
    return load_model("runs/table/model"), federation


def test_a_draft_comes_close_to_training_without_privacy(tmp_path, monkeypatch):
    """ε = 2: the AUC at most 0.03 below, and the log-loss better than that of a constant answer."""
    monkeypatch.chdir(tmp_path)
    model, federation = drafted(wards, "--label", "ill", "--user", "site")
    (x, y), (tested, truth) = (
        (part.features.numpy(), part.labels.numpy()) for part in (federation.train, federation.test)
    )
    central = LogisticRegression(C=100, max_iter=1000).fit(x, y).predict_proba(tested)[:, 1]
    ours = model.probabilities(tested, prepared=True)[:, 1].numpy()
    assert roc_auc_score(truth, ours) > roc_auc_score(truth, central) - 0.03
    assert log_loss(truth, ours) < log_loss(truth, np.full(len(truth), y.mean()))
