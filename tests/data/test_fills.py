"""Missing values filled with a private mean or median: what it releases, protects and costs."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refuses
from scipy import stats
from typed import typed

from dpscaffold.data import load_federation
from dpscaffold.data.private import released
from dpscaffold.data.tables import missing
from dpscaffold.data.tables.missing import BINS, PrivateFill
from dpscaffold.privacy.costs import Cost

VALUES = np.array([2.0, 4.03, np.nan, 9.0, 50.0, -3.0, np.nan, 3.0, 4.03] * 50)
CLIPPED = np.clip(VALUES[~np.isnan(VALUES)], 0, 10)


@pytest.mark.parametrize("fill", ["mean", "median"])
def test_without_much_noise_it_is_the_statistic(fill: str) -> None:
    rule = PrivateFill(fill=fill, low=0, high=10, noise=1e-9)  # type: ignore[arg-type]
    exact = CLIPPED.mean() if fill == "mean" else np.median(CLIPPED)
    near = 1e-6 if fill == "mean" else 10 / BINS
    assert rule.value("stay", VALUES, 0) == pytest.approx(exact, abs=near)


def test_the_noise_is_what_is_accounted() -> None:
    """The mean's two sums move by 2z per coordinate: a χ² test at 99.9 % that also rejects a noise
    of 0.8 and 1.25 times that."""
    z, seeds = 3.0, 800
    rule = PrivateFill(fill="mean", low=-1, high=1, noise=z)
    many = np.zeros(100_000)  # so that the quotient's noise is the sum's over n
    found = np.array([rule.value("a", many, seed) for seed in range(seeds)]) * len(many)
    for scale, accepted in ((1.0, True), (0.8, False), (1.25, False)):
        statistic = (found**2).sum() / (2 * z * scale) ** 2
        low, high = stats.chi2.ppf([0.0005, 0.9995], seeds)
        assert (low < statistic < high) == accepted, scale


@pytest.mark.parametrize(
    ("fill", "replaced", "removed"), [("mean", 2.0, math.sqrt(2)), ("median", math.sqrt(2), 1.0)]
)
def test_no_record_moves_the_released_sums_by_more(fill, replaced, removed) -> None:
    """Over single records of every kind, NaN and infinity included; and the bound is met."""

    def released(x: float) -> np.ndarray:
        value = np.array([x])
        there = np.clip(value[~np.isnan(value)], 0, 10)
        if fill == "mean":
            return np.array([((there - 5) / 5).sum(), len(there)])
        return np.histogram(there, BINS, (0, 10))[0].astype(float)

    records = [math.nan, -math.inf, math.inf, 1e300, -1e-300, 0.0, 10.0, 5.0, 9.9999, 3.3]
    moves = [np.linalg.norm(released(a) - released(b)) for a in records for b in records]
    alone = [np.linalg.norm(released(a)) for a in records]
    assert max(moves) == pytest.approx(replaced) and max(alone) == pytest.approx(removed)
    rule = PrivateFill(fill=fill, low=0, high=10, noise=7.0)
    cost = rule.cost("stay")
    assert cost.noise == 7.0 and cost.add_remove == pytest.approx(7.0 * replaced / removed)


TABLE: dict[str, Any] = {"source": "csv", "label": "ill", "user": "site", "preprocess": []}


def written(folder: Path) -> Path:
    lines = [
        f"{'' if i % 5 == 0 else i % 9},{'nsw'[i % 3]},{'yn'[i * 7 % 4 < 2]}" for i in range(120)
    ]
    (folder / "a.csv").write_text("stay,site,ill\n" + "\n".join(lines) + "\n")
    return folder / "a.csv"


def rule(**more: Any) -> dict[str, Any]:
    return {"stay": {"fill": "mean", "low": 0, "high": 8, "noise": 4.0, **more}}


def test_it_is_a_private_step_with_its_cost(tmp_path: Path, monkeypatch, capsys) -> None:
    """Named and counted in the statement, once, next to the training."""
    path = written(tmp_path)
    data = load_federation({**TABLE, "path": path, "missing": rule()})
    step = next(s for s in data.preparation if s.protection == "private")
    assert step.cost == Cost("mean of column 'stay'", 4.0, add_remove=4 * 2**0.5, seeded=True)
    again = load_federation({**TABLE, "path": path, "missing": rule()})
    other = load_federation({**TABLE, "path": path, "missing": rule(), "seed": 5})
    assert dict(data.preparation[0].fills) == dict(again.preparation[0].fills)
    assert dict(data.preparation[0].fills) != dict(other.preparation[0].fills)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(
        '[data]\nsource = "csv"\npath = "a.csv"\nlabel = "ill"\nuser = "site"\npreprocess = []\n'
        'missing = { stay = { fill = "mean", low = 0.0, high = 8.0, noise = 4.0 } }\n'
        "[plan]\nrounds = 2\nlocal_steps = 1\nuser_ratio = 0.5\n[privacy]\nnoise = 5.0\n"
    )

    command = partial(typed, monkeypatch, capsys)
    code, out, err = command("train", "c.toml", "--out", "run", "--json")
    assert code == 0, err
    said = json.loads(out)["privacy"]
    assert [(c["name"], c["noise"]) for c in said["extra_costs"]] == [
        ("mean of column 'stay'", 4.0)
    ]
    assert said["server"]["epsilon"] > said["server"]["training_alone"]
    assert not any("'stay'" in sentence for sentence in said["outside"])
    assert command("train", "--resume", "run", "-q")[0] == 0, "the stored rule is read back"
    code, out, err = command(
        "train", "c.toml", "--out", "b", "--set", "privacy.unit=user", "--json"
    )
    assert code == 0, err
    assert any("'stay'" in s for s in json.loads(out)["privacy"]["outside"]), "records, not users"
    code, _, err = command("train", "c.toml", "--out", "c", "--set", "privacy.secret=true")
    assert code == 2 and "came from the data's seed" in err


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (rule(low=9), "bad-range"),
        (rule(noise=None), "noise-or-epsilon"),
        (rule(epsilon=1.0, delta=1e-5), "noise-or-epsilon"),
        (rule(entropy="system"), "repeated-release"),
        ({"*": rule()["stay"]}, "wrong-column-kind"),
        (
            {"stay": {"fill": "mode", "low": 0, "high": 1, "noise": 1}},
            "unknown-choice: 'mean' … 'median'",
        ),
    ],
)
def test_rules_that_cannot_be(missing: Any, said: str, tmp_path: Path) -> None:
    with refuses(said):
        load_federation({**TABLE, "path": written(tmp_path), "missing": missing})


def test_system_noise_is_drawn_once_when_prepared(tmp_path: Path) -> None:
    from dpscaffold.data import prepare

    missing = rule(entropy="system", noise=None, epsilon=1.0, delta=1e-5)
    settings = {**TABLE, "path": str(written(tmp_path)), "missing": missing}
    stored = load_federation({"source": "saved", "path": prepare(settings, tmp_path / "stored")})
    step = next(s for s in stored.preparation if s.protection == "private")
    assert step.cost is not None and not step.cost.seeded
    assert step.cost.noise == pytest.approx(3.7306, rel=1e-3)  # the analytic Gaussian mechanism


@pytest.mark.parametrize(("fill", "spread"), [("mean", 6.0), ("median", 3 * math.sqrt(2))])
def test_secret_sums_lie_on_the_public_grid(fill: Any, spread: float, monkeypatch) -> None:
    """And seeded ones do not: they are what they were."""
    sums: list[np.ndarray] = []
    monkeypatch.setattr(missing, "released", lambda *a: sums.append(released(*a)) or sums[-1])
    step = 2.0 ** (math.floor(math.log2(spread)) - 20)
    for entropy in ("system", "seed"):
        rule = PrivateFill(fill=fill, low=0, high=10, noise=3.0, entropy=entropy)
        rule.value("stay", VALUES, 0)
        assert bool((sums[-1] % step == 0).all()) == (entropy == "system")
