"""Private preprocessing in a run's account: in every row, cap and quote; released once."""

from __future__ import annotations

import math
import shutil
from itertools import permutations

import pytest
from privacy.explicit_pairs import gaussian_epsilon
from refusals import refuses
from small import federation
from stated import at_most, stated, written
from typer.testing import CliRunner

from dpscaffold import BadInput, Gaussian, Logistic, Plan, fedavg, train
from dpscaffold.cli import app
from dpscaffold.config import make_run
from dpscaffold.data import load_federation, preprocess
from dpscaffold.runs.ledger import read_account

DELTA, ROUNDS, NOISE, MEAN = 1e-3, 6, 4.0, 2.5
CENTRE = {"step": "centre", "fit": "private", "norm_bound": 1.0, "noise": MEAN}
#: Everyone, with all records, one step a round: every count of rounds is a Gaussian of its own.
PLAN = Plan(rounds=ROUNDS, local_steps=1, user_ratio=1.0, data_ratio=1.0)


def exact(participations: int) -> float:
    """n Gaussians of multiplier σ_g and one of multiplier z: one of μ² = n/σ_g² + 1/z²."""
    return gaussian_epsilon(DELTA, math.sqrt(participations / NOISE**2 + 1 / MEAN**2))


def centred():
    return preprocess(federation(), [CENTRE])


def run(**limits):
    privacy = Gaussian(noise=NOISE, delta=DELTA, **limits)
    return train(centred(), Logistic(4, 3), fedavg(), PLAN, privacy)


def test_every_row_and_quote_counts_it():
    said = run().privacy
    stands = {one.adversary: one for one in said.guarantees}
    assert set(stands) == {"server", "third_party", "participant"}
    server = stands["server"]
    for value in (server.epsilon, server.given, at_most(said.run, costs=said.parts[0].costs)):
        assert exact(ROUNDS) <= value <= exact(ROUNDS) * 1.003
    for one in stands.values():
        assert one.epsilon > exact(0)


def test_a_user_who_never_took_part_has_spent_it_too(tmp_path):
    plan = Plan(rounds=1, local_steps=1, user_ratio=0.34, data_ratio=1.0)
    folder = tmp_path / "run"
    privacy = Gaussian(noise=NOISE, delta=DELTA)
    train(centred(), Logistic(4, 3), fedavg(), plan, privacy, out=folder)
    ledger = read_account(folder).ledger
    idle = int(ledger.participations.argmin())
    assert ledger.participations[idle] == 0
    assert exact(0) <= ledger.of(idle) <= exact(0) * 1.003


def test_the_cap_per_user_leaves_room_for_it():
    """The most participations within ε, computed in closed form; without the mean there are
    more."""
    limit = 1.05 * exact(3)
    assert limit < exact(4)
    said = run(user_epsilon=limit).privacy
    assert set(said.parts[-1].participations) == {3}
    assert exact(3) <= said.towards("server").given <= limit


def gone_on(folder, rounds: int, seed: int = 0) -> None:
    """Train with the prepared mean in a folder, or go on there."""
    train(
        centred(),
        Logistic(4, 3),
        fedavg(),
        PLAN.changed(rounds=rounds, seed=seed),
        Gaussian(noise=NOISE, delta=DELTA),
        out=folder,
        resume=folder.exists(),
    )


@pytest.mark.parametrize("order", list(permutations(("more", "copy", "resume"))), ids="-".join)
def test_whatever_a_folder_holds_is_in_its_sums(order, tmp_path):
    """Rounds, more rounds later and a prepared mean, in every order, after a copy and a resume: the
    folder, its model and two folders together state what all Gaussians cost."""
    folder, rounds = tmp_path / "run", ROUNDS
    gone_on(folder, rounds)
    for step in order:
        if step == "copy":
            shutil.copytree(folder, tmp_path / "moved")
            shutil.rmtree(folder)
            folder = tmp_path / "moved"
        elif step == "more":
            rounds += 2
            gone_on(folder, rounds)
        else:
            gone_on(folder, rounds)
    later = gaussian_epsilon(DELTA, math.sqrt((rounds - ROUNDS) / NOISE**2))
    whole = exact(ROUNDS) + later
    for said in (stated(folder), written(folder), stated(folder / "model")):
        assert whole <= said.epsilon <= whole * 1.003
    other = tmp_path / "other"
    gone_on(other, ROUNDS, seed=1)
    both = stated(folder, other)
    total = whole + exact(ROUNDS)
    assert total <= both.towards("server").given <= total * 1.003


def test_more_rounds_do_not_make_it_free(tmp_path):
    """Three rounds with the mean next to them, then more, which are a part of their own: two of
    these fit in closed form, and without the mean there would be room for all."""

    def plain(participations: int) -> float:
        return gaussian_epsilon(DELTA, math.sqrt(participations) / NOISE)

    most = 1.02 * (exact(3) + plain(2))
    assert most < exact(3) + plain(3) and plain(3) + plain(4) < most
    privacy = Gaussian(noise=NOISE, delta=DELTA, user_epsilon=most)
    given = (centred(), Logistic(4, 3), fedavg())
    for rounds in (3, 7):
        plan = PLAN.changed(rounds=rounds)
        result = train(*given, plan, privacy, out=tmp_path / "run",
                       resume=rounds == 7)  # fmt: skip
    said = result.privacy
    assert [set(part.participations) for part in said.parts] == [{3}, {2}]
    assert exact(3) + plain(2) <= said.towards("server").given <= most
    assert result.rounds == 7
    assert result.history[-1]["epsilon_server"] >= exact(3) + plain(2)


def test_a_cap_below_its_cost_is_refused():
    with refuses("budget-too-small: user_epsilon=0.5"):
        run(user_epsilon=0.5)


def test_seeded_noise_in_a_secret_run_is_refused():
    secret = Gaussian(noise=NOISE, secret=True)
    with refuses("noise-not-secret"):
        train(centred(), Logistic(4, 3), fedavg(), PLAN, secret)


def test_system_noise_is_drawn_by_prepare_alone(tmp_path):
    """A load would release it again, so it draws from the seed, and no secret run accepts that; a
    stored federation is the same at every load."""
    seeded = load_federation({"source": "digits", "users": 4, "preprocess": [CENTRE]})
    assert [s.cost.seeded for s in seeded.preparation if s.cost] == [True]
    config = tmp_path / "config.toml"
    config.write_text(
        '[data]\nsource = "digits"\nusers = 4\n[[data.preprocess]]\nstep = "centre"\n'
        'fit = "private"\nnorm_bound = 1.0\nnoise = 2.5\n'
        "[plan]\nrounds = 2\nlocal_steps = 1\nuser_ratio = 0.5\n"
        "[privacy]\nnoise = 4.0\nsecret = true\n"
    )
    for command in (["train", "--out", str(tmp_path / "run")], ["privacy"]):
        answer = CliRunner().invoke(app, [*command, str(config)])
        assert isinstance(answer.exception, BadInput), answer.output
        assert "data prepare" in str(answer.exception)
    assert not (tmp_path / "run").exists()
    stored = tmp_path / "stored"
    prepared = CliRunner().invoke(app, ["data", "prepare", str(config), "--out", str(stored)])
    assert prepared.exit_code == 0, prepared.output
    before = (stored / "federation.json").read_bytes()
    again = ["data", "prepare", str(config), "--out", str(stored), "--overwrite"]
    refused = CliRunner().invoke(app, again)
    assert isinstance(refused.exception, BadInput)
    assert "the private mean" in str(refused.exception)
    assert "second release" in str(refused.exception)
    assert (stored / "federation.json").read_bytes() == before
    first, second = (load_federation({"source": "saved", "path": str(stored)}) for _ in range(2))
    assert first.train.digest() == second.train.digest()
    assert [s.cost.seeded for s in first.preparation if s.cost] == [False]
    secret = Gaussian(noise=NOISE, secret=True)
    plan = Plan(rounds=2, local_steps=1, user_ratio=0.5)
    said = train(first, Logistic(64, 10), fedavg(), plan, secret).privacy
    assert [cost.name for cost in said.parts[0].costs] == ["mean"]


def test_a_mean_over_all_records_is_not_hidden_where_their_number_is(tmp_path):
    """Under add/remove one record more changes the divisor, which has no noise: the step is named
    outside and costs nothing; principal components have no divisor, and stay in the account."""
    from dpscaffold.privacy import charged

    steps = [CENTRE, {**CENTRE, "step": "pca", "components": 2}]
    prepared = preprocess(federation(), steps)
    plan = Plan(rounds=2, local_steps=1, user_ratio=1.0, data_ratio=0.5)
    for data, counted in ((prepared.declaring(40), 1), (prepared, 2)):
        privacy = Gaussian(noise=NOISE, sampling="poisson", delta=DELTA)
        given = make_run(data.roster, Logistic(2, 3), fedavg(), plan, privacy)
        run = given.describe()
        costs, outside = charged(data.preparation, run)
        assert len(costs) == counted and len(outside) == 2 - counted
        assert charged(given.roster.schema.preparation, run) == (costs, outside)
        said = train(data, given.task, fedavg(), plan, privacy).privacy
        assert len(said.parts[0].costs) == counted
        assert sum("mean: its noise hides" in text for _, text in said.outside) == 2 - counted
