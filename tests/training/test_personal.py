"""Personal models: fits near the common model against closed forms, and what is said of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from small import federation
from torch import Tensor
from typed import done_here

from dpscaffold import (
    BadInput,
    Federation,
    Gaussian,
    Logistic,
    Mlp,
    Plan,
    Result,
    fedavg,
    load_model,
    run,
    train,
)
from dpscaffold.models.evaluate import evaluate, score_held_out
from dpscaffold.models.export import export
from dpscaffold.models.personal import (
    NOT_COVERED,
    compare_sites,
    split,
)
from dpscaffold.tasks import Task
from dpscaffold.tasks.linear import Linear
from dpscaffold.tasks.losses import LOSSES
from dpscaffold.tasks.near import NearFit, SiteRows, better_of, fit_sites

SQUARED = Linear(3, 1, LOSSES["squared"])


def fit_near(task: Task, rows: SiteRows, centre: Tensor, strength: float | None = None) -> NearFit:
    """The fit of one site."""
    return fit_sites(task, [rows], centre, strength)[0]


def numbers(count: int, seed: int = 0) -> SiteRows:
    """Rows of a linear law with noise."""
    stream = np.random.default_rng(seed)
    x = stream.standard_normal((count, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.7 + 0.5 * stream.standard_normal(count)
    return SiteRows(torch.from_numpy(x), torch.from_numpy(y.astype(np.float32)))


def solved(rows: SiteRows, centre: np.ndarray, strength: float) -> np.ndarray:
    """Ridge towards a centre, from the normal equations."""
    x = np.c_[rows.features.double().numpy(), np.ones(len(rows))]
    y, n = rows.labels.double().numpy(), len(rows)
    return centre + np.linalg.solve(x.T @ x / n + strength * np.eye(4), x.T @ (y - x @ centre) / n)


def trained(classes: int = 3) -> Result:
    data = federation((12, 12, 12), classes=classes)
    return train(
        data,
        Logistic(4, classes),
        fedavg(),
        Plan(rounds=2, local_steps=2, user_ratio=1.0),
        Gaussian(noise=5.0),
    )


@pytest.mark.parametrize("strength", [0.0, 0.3, 100.0])
def test_a_linear_fit_solves_the_normal_equations(strength: float) -> None:
    rows, centre = numbers(20), np.array([0.5, 0.5, 0.5, -1.0])
    found = fit_near(SQUARED, rows, torch.from_numpy(centre), strength)
    np.testing.assert_allclose(found.params, solved(rows, centre, strength), atol=1e-5)


def test_held_out_losses_are_those_of_fits_without_each_record() -> None:
    """The closed form against n fits. A fit to n − 1 records has the strength λn/(n − 1), because
    λ is for the mean of the losses."""
    rows, centre, strength = numbers(9), np.array([0.2, 0.0, -0.3, 0.1]), 0.05
    found = fit_near(SQUARED, rows, torch.from_numpy(centre), strength)
    for j in range(9):
        rest = rows.some(torch.tensor([k for k in range(9) if k != j]))
        params = solved(rest, centre, strength * 9 / 8)
        row = np.append(rows.features[j].double().numpy(), 1.0)
        expected = 0.5 * (row @ params - float(rows.labels[j])) ** 2
        assert float(found.held_out[j]) == pytest.approx(expected, rel=1e-5)


def test_the_strength_with_the_smallest_held_out_loss_is_chosen() -> None:
    rows, far = numbers(12), torch.full((4,), 3.0)
    chosen = fit_near(SQUARED, rows, far)
    assert all(chosen.loss <= fit_near(SQUARED, rows, far, s).loss for s in (1e-4, 0.1, 10, 1e9))
    truth = torch.tensor([1.0, -2.0, 0.5, 0.7])  # few noisy records near the truth: stay there
    assert fit_near(SQUARED, numbers(5), truth).strength > fit_near(SQUARED, rows, far).strength


@pytest.mark.parametrize("task", [Logistic(4, 3), Mlp(4, 3, hidden=5)], ids=["convex", "network"])
def test_other_tasks_are_fitted_to_a_stationary_point(task: Logistic | Mlp) -> None:
    data = federation((20,))
    rows, centre, strength = SiteRows(*data.train.of(0)), task.initial(1) + 0.1, 0.05
    params = fit_near(task, rows, centre, strength).params.requires_grad_()
    loss = task.losses(params, task.prepare(rows.features), rows.labels).mean()
    loss = loss + 0.5 * strength * (params - centre).square().sum()
    (gradient,) = torch.autograd.grad(loss, params)
    assert float(gradient.norm()) < (5e-3 if task.convex else 0.05)  # ReLU has kinks


def test_a_single_record_leaves_the_common_model_as_it_is() -> None:
    for task, rows in (
        (SQUARED, numbers(1)),
        (Logistic(3, 2), SiteRows(torch.ones(1, 3), torch.tensor([1]))),
    ):
        centre = torch.ones(task.parameters)
        found = fit_near(task, rows, centre)
        assert found.strength == math.inf
        torch.testing.assert_close(found.params, centre)


def test_a_local_fit_needs_to_be_clearly_better() -> None:
    first = NearFit(torch.zeros(1), 1.0, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    slightly = NearFit(torch.ones(1), 1.0, torch.tensor([1.5, 1.0, 3.4, 4.0]))
    clearly = NearFit(torch.ones(1), 1.0, torch.tensor([0.5, 1.4, 2.5, 3.4]))
    assert better_of([first, slightly]) is first
    assert better_of([first, clearly]) is clearly


def test_a_personal_model_says_that_nothing_covers_it(tmp_path: Path) -> None:
    model = load_model(trained().personal("1").save(tmp_path / "one"))
    assert model.origin.personal == "1"
    assert model.privacy is not None and not model.privacy.guarantee
    assert model.unprotected == (NOT_COVERED,)
    assert NOT_COVERED.rstrip(".") in (tmp_path / "one" / "privacy.md").read_text()
    with refuses("not-protected"):
        export(model, "safetensors", tmp_path / "out", only_protected=True)


def test_bad_requests_are_refused() -> None:
    result = trained()
    with refuses("unknown-user: north"):
        result.personal("north")
    with refuses("unknown-user: 3"):
        result.personal(3)
    with refuses("out-of-range: -1"):
        result.personal(0, strength=-1.0)
    with refuses("no-rows"):
        fit_near(SQUARED, numbers(3).some(torch.tensor([], dtype=torch.long)), torch.zeros(4))
    with refuses("too-few-rows: 4"):
        split(numbers(4))
    with refuses("out-of-range: strength is -1"):
        run({"personal": {"strength": -1.0}})


def test_a_private_head_is_refused_with_the_reason() -> None:
    for kind in ("private-head", "fedper", "fedrep"):
        with refuses(f"private-head: {kind} … one record moves the gradients of all others"):
            run({"personal": {"kind": kind}})


def test_three_numbers_are_the_accuracies_of_three_models() -> None:
    result = trained()
    compared = compare_sites(result.model, result.federation)
    by_site = evaluate(result.model, score_held_out(result.model, result.federation)).sites
    for user, (one, said) in enumerate(zip(compared.sites, by_site, strict=True)):
        x, y = result.federation.test.of(user)
        own = result.personal(user).predict(x, prepared=True)
        assert one.common == said["accuracy"]
        assert one.personal == float((own == y).double().mean())
        assert one.gain == one.personal - one.local
        assert ("helps" in one.sentence and "not" not in one.sentence) == (one.gain > 0)


def test_a_site_that_is_like_no_other_keeps_its_own_model() -> None:
    """Two sites of opposite labels: the common model cannot serve both, a local one can."""
    stream = np.random.default_rng(3)
    x = stream.standard_normal((2, 60, 2)).astype(np.float32)
    y = np.stack([x[0, :, 0] > 0, x[1, :, 0] <= 0]).astype(np.int64)
    data = Federation.from_arrays(
        list(zip(x[:, :40], y[:, :40], strict=True)), list(zip(x[:, 40:], y[:, 40:], strict=True))
    )
    result = train(data, Logistic(2, 2), fedavg(), Plan(rounds=4, local_steps=3, user_ratio=1.0))
    compared = result.compare_sites()
    assert compared.mean("personal") > 0.9 > 0.75 > compared.mean("common")
    assert compared.mean("personal") >= compared.mean("local") - 0.05
    assert "does not help" in compared.sentence or compared.mean("gain") > 0


TABLES = {
    "data": {"users": 4, "records": 30, "features": 4, "classes": 3},
    "plan": {"rounds": 2, "local_steps": 2, "user_ratio": 1.0},
    "privacy": {"epsilon": 5.0},
    "personal": {"kind": "fine-tune"},
}


def test_a_run_keeps_the_three_numbers_and_its_report_shows_them(tmp_path: Path) -> None:
    result = run(TABLES, out=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "personal.json").read_text())
    assert result.joining is not None and kept["sentence"] == result.joining.sentence
    assert set(kept["mean"]) == {"local", "global", "personal"} and len(kept["sites"]) == 4
    said = json.loads(done_here("evaluate", tmp_path / "run", "--json").stdout)
    assert said["joining"]["mean"] == kept["mean"]
    figure = tmp_path / "figure.svg"
    done = done_here("evaluate", tmp_path / "run", "--figure", figure)
    assert "oining" in done.stdout and "sorted by its local model" in figure.read_text()
    done_here("report", tmp_path / "run", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Whether joining helps" in page and kept["note"][:40] in page


def test_a_site_fits_its_own_table_on_the_command_line(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    rows = ["a,b,ill,site"]
    for k in range(60):
        a, b = stream.standard_normal(2)
        rows.append(f"{a:.3f},{b:.3f},{'yes' if a + (k % 2) > 0.5 else 'no'},s{k % 2}")
    (tmp_path / "all.csv").write_text("\n".join(rows))
    (tmp_path / "own.csv").write_text("\n".join([rows[0], *rows[1::2]]))
    data = {"source": "csv", "path": str(tmp_path / "all.csv"), "label": "ill", "user": "site"}
    run({**TABLES, "data": data}, out=tmp_path / "run")
    place = tmp_path / "own"
    done = done_here("personalise", tmp_path / "run", tmp_path / "own.csv", "--out", place)
    assert done.returncode == 0 and "Joining" in done.stdout and NOT_COVERED in done.stdout
    assert load_model(place).origin.personal == "own"
    done = done_here("predict", place, tmp_path / "own.csv", "--out", tmp_path / "answers.csv")
    assert NOT_COVERED in done.stderr
    said = json.loads(done_here("evaluate", place, tmp_path / "own.csv", "--json").stdout)
    assert NOT_COVERED in said["note"]
    done = done_here("personalise", place, tmp_path / "own.csv", "--out", tmp_path / "again")
    assert done.returncode == 2 and "personal model of 'own'" in done.stderr
    assert not (tmp_path / "again").exists()
    with pytest.raises(BadInput):
        load_model(tmp_path / "again")


@pytest.mark.parametrize("name", ["noised.jsonl", "personal-privacy.json", "joining.json"])
def test_a_folder_with_releases_that_are_not_added_is_refused(name: str, tmp_path: Path) -> None:
    """By everything that states, adds up or fits further: more was spent than its ledger says."""
    data = federation((12, 12, 12), classes=3)
    plan = Plan(rounds=2, local_steps=2, user_ratio=1.0)
    for run_folder in ("one", "two"):
        train(data, Logistic(4, 3), fedavg(), plan, Gaussian(noise=5.0), out=tmp_path / run_folder)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    (tmp_path / "rows.csv").write_text("a\n1\n")
    rows = str(tmp_path / "rows.csv")
    calls = (
        ["privacy", one],
        ["privacy", two, one],
        ["report", one, "--out", str(tmp_path / "page.html")],
        ["personalise", one, rows, "--out", str(tmp_path / "own")],
        ["personalise", f"{one}/model", rows, "--out", str(tmp_path / "own")],
        ["export", one, "--to", "safetensors", "--out", str(tmp_path / "exported")],
        ["compare", one, two, "--json"],
    )
    (tmp_path / "one" / name).write_text("{}\n")
    for words in calls:
        done = done_here(*words)
        assert done.returncode == 2 and "written by" in done.stderr, (words, done)
    (tmp_path / "one" / name).rename(tmp_path / "one" / "model" / name)
    with refuses("wrong-version"):
        load_model(tmp_path / "one")
    assert not (tmp_path / "own").exists() and not (tmp_path / "page.html").exists()
