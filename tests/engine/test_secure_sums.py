"""Secure sums in the simulator: integers that agree between engines, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses
from small import (
    ENGINES,
    EQUAL,
    TASKS,
    UNEQUAL,
    Driven,
    Trial,
    federation,
    final,
    setting,
    simulator,
)
from stated import page_of

from dpscaffold import Gaussian, Logistic, Plan, fedavg, fedprox, train
from dpscaffold.algorithms import Broadcast, Upload, with_momentum
from dpscaffold.config import Secure
from dpscaffold.config.gaussian import NoisedStep
from dpscaffold.engine import Draw
from dpscaffold.engine.aggregate import Summed, aggregate
from dpscaffold.engine.query import Numbers, SecureMean
from dpscaffold.privacy.adversary import CLIPPED_SHARE, MOST_SUMMED
from dpscaffold.tasks import Batch
from dpscaffold.tasks.clipping import RECORDS_ADDED, LayerOuter

ONE_STEP = {"local_steps": 1, "user_ratio": 1.0, "data_ratio": 1 / 3}
PRIVATE = ["fixed", "poisson", "user", "user-poisson"]


def secure(
    task: str = "logistic",
    privacy: str | Gaussian = "fixed",
    algorithm: object = "fedavg",
    sizes: tuple[int, ...] = UNEQUAL,
    sums: Secure | None = Secure(1),  # noqa: B008
    **plan: object,
) -> Trial:
    """A run of one local step of all users, with secure sums."""
    run = setting(algorithm, task, privacy, federation(sizes), **{**ONE_STEP, **plan})
    return replace(run, secure=sums)


@pytest.fixture
def integers(monkeypatch):
    """What is added up, by user, of one round after the other."""
    seen: list[dict[int, list[int]]] = []
    real = Summed.participate

    def watch(self, of, drawn, users):
        upload, kept = real(self, of, drawn, users)
        assert upload.params.dtype == torch.int64
        (own,) = users.values()
        if not seen or seen[-1].keys() & set(own):
            seen.append({})
        seen[-1].update(zip(own, upload.params.tolist(), strict=True))
        return upload, kept

    monkeypatch.setattr(Summed, "participate", watch)
    return seen


def mean_of(task, params, batch, clip=10.0, shifts=False):
    """The mean gradient of one batch of one record, without noise."""
    one, normals = torch.ones(1, 1), torch.zeros(1, task.parameters)
    numbers = Numbers(one, one, one, one, clip * one, one, one, 1)
    return SecureMean(NoisedStep(), shifts)(task, params, batch, numbers, normals)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("privacy", PRIVATE)
@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_engines_add_the_same_integers(task, privacy, weighting, integers):
    """An upload differs by one step of the grid at most, where a float32 gradient is rounded."""
    if weighting == "records" and privacy.startswith("user"):
        pytest.skip("weights by records reveal a user's size")
    run = secure(task, privacy, weighting=weighting, rounds=2)
    for engine in ENGINES:
        final(engine, run, rounds=1)
    one, two = (np.array([seen[user] for user in sorted(seen)]) for seen in integers)
    assert one.shape == (run.users, run.task.parameters)
    assert np.abs(one - two).max() <= 1 and (one != two).mean() < 0.02


@pytest.mark.parametrize("privacy", PRIVATE)
@pytest.mark.parametrize(
    "algorithm", [fedavg(), fedprox(0.3), with_momentum(fedavg(), 0.5)], ids=lambda a: a.shown
)
def test_a_secure_run_is_the_plain_run_up_to_the_grid(privacy, algorithm):
    """The same draws and the same noise: only the rounding to σ/2¹⁰ differs."""
    run = secure("logistic", privacy, algorithm, averaging="tail")
    plain, summed = (final("simulator", r) for r in (replace(run, secure=None), run))
    assert not torch.equal(plain.params, summed.params)
    spread = float(torch.as_tensor(run.known(range(run.users)).spread).max())
    step = spread * run.plan.step_size
    assert float((plain.params - summed.params).abs().max()) < 8 * step / 2**10
    assert float((plain.output - summed.output).abs().max()) < 8 * step / 2**10


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_and_order_change_no_bit(chunk, integers):
    """Integers add up alike in any order."""
    run = secure("logistic", "poisson")
    whole = final("simulator", run)
    found = Driven(simulator(run, chunk=chunk)).drive().reached
    assert torch.equal(whole.params, found.params)
    assert integers[0] == integers[run.plan.rounds]


def test_a_stack_of_secure_runs_is_each_of_them():
    """Runs with other noise, and so other grids, share a stack."""
    runs = [secure(privacy=Gaussian(0.7, noise), sizes=EQUAL) for noise in (0.8, 30.0)]
    assert runs[0].sums.grid != runs[1].sums.grid
    together = Driven(simulator(runs)).drive().all_reached
    for run, found in zip(runs, together, strict=True):
        assert torch.equal(found.params, final("simulator", run).params)
    with refuses("not-stackable: secure"):
        simulator([runs[0], replace(runs[1], secure=Secure(2))])


def test_the_noise_follows_the_list(integers):
    """With fewer members each adds more noise, as the plan says; below least there is no round."""
    run = secure(sizes=EQUAL, sums=Secure(1, least=4), privacy=Gaussian(1e-9, 1e6))
    spreads = {}
    for count in (6, 4):
        integers.clear()
        for engine in ENGINES:
            drawn = np.arange(6)
            ENGINES[engine](run).rounds(Draw(drawn, drawn[:count]))
        each = [np.array(list(seen.values())) for seen in integers]
        assert np.abs(each[0] - each[1]).max() <= 1
        spreads[count] = each[0][0].astype(float)
    assert np.abs(spreads[4] - spreads[6] * (5 / 3) ** 0.5).max() < 2  # both were rounded
    with refuses("too-few-sites: 3"):
        ENGINES["simulator"](run).rounds(Draw(np.arange(6), np.arange(3)))


def test_a_missing_upload_leaves_no_sum():
    """All or nothing."""
    run = secure()
    broadcast = Broadcast(1, ENGINES["simulator"](run).state.params)
    draw, none = Draw.all(np.arange(6)), torch.zeros(2, run.task.parameters, dtype=torch.int64)
    with refuses("uploads-missing: 2 of 6"):
        aggregate(run, draw, broadcast, [([0, 1], Upload(none))])
    for wrong in (Upload(none.float()), Upload(none, {"control": none})):
        with refuses("wrong-type"):
            aggregate(run, draw, broadcast, [([0, 1], wrong)])


def test_sums_are_in_float64():
    """Small gradients after a block with a large one: float32 would lose them."""
    large = torch.tensor([[[1.0]] + [[0.0]] * 63 + [[2.0**-25]] * 512])
    batch = Batch(large, torch.zeros(1, 576, dtype=torch.long), tame=False)
    found = mean_of(Logistic(0, 2), torch.zeros(1, 2), batch)
    assert found.dtype == torch.float64
    assert float(found[0, 1]) == 0.5 * (1 + 512 * 2.0**-25)


def outer(records: torch.Tensor, left: torch.Tensor, how: str) -> torch.Tensor:
    return LayerOuter(left, records, exact=how).total()[0]


@pytest.mark.parametrize("place", [0, 63, 64, 700])
def test_one_record_changes_the_rounding_of_its_block_only(place):
    """Blocks as long as possible with the record's block at its worst: the computed sums are no
    further apart than the lemma says, and all other blocks are the same to the last bit."""
    made = torch.Generator().manual_seed(place)
    records, left = torch.randn(1, 7, 1000, generator=made), torch.randn(1, 5, 1000, generator=made)
    lengths = left.norm(dim=1, keepdim=True) * records.norm(dim=1, keepdim=True)
    left = left / lengths * (1 - 1e-6)  # C = 1
    other = left.clone()
    other[0, :, place] = 0
    sums = [outer(records, one, "blocks") for one in (left, other)]
    plain = left[0, :, place].double().outer(records[0, :, place].double())
    apart = sums[0] - sums[1]
    assert float(apart.norm()) <= float(plain.norm()) + 2 * RECORDS_ADDED**2 * 2.0**-24
    # Without its block, not a bit of the others differs.
    begin = place // RECORDS_ADDED * RECORDS_ADDED
    block = slice(begin, begin + RECORDS_ADDED)
    own = [torch.bmm(one[:, :, block], records[:, :, block].transpose(1, 2))[0].double()
           for one in (left, other)]  # fmt: skip
    assert float((apart - (own[0] - own[1])).norm()) <= 2 * (1000**2 + 16000) * 2.0**-53


def test_a_block_is_rounded_as_the_lemma_says_at_its_worst():
    """Half an ulp is lost at each of the 63 additions: close to q²u′ and never above."""
    left = torch.ones(1, 1, RECORDS_ADDED)
    values = torch.full((1, 1, RECORDS_ADDED), 2.0**-24)
    values[0, 0, 0] = 1.0
    lost = abs(float(outer(values, left, "blocks")) - float(outer(values, left, "double")))
    assert lost <= RECORDS_ADDED**2 * 2.0**-24
    wide = torch.cat([values, torch.full((1, 1, 4096), 2.0**-24)], dim=2)
    ones = torch.ones(1, 1, wide.shape[2])
    found, exact = float(outer(wide, ones, "blocks")), float(outer(wide, ones, "double"))
    assert abs(found - exact) <= RECORDS_ADDED**2 * 2.0**-24, "later blocks lose nothing"


def test_products_are_double_where_float32_may_have_fewer_bits():
    """Somebody allowed TF32 or bfloat16: no product is float32."""
    left, records = torch.randn(1, 3, 100), torch.randn(1, 4, 100)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = outer(records, left, "blocks")
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found, outer(records, left, "double"))
    assert not torch.equal(found, outer(records, left, "blocks"))


@pytest.mark.parametrize("shifting", [False, True])
def test_declared_sizes_have_double_products(shifting):
    """A record that is added or removed shifts the others into other blocks."""
    made = torch.Generator().manual_seed(5)
    batch = Batch(torch.randn(1, 200, 3, generator=made), torch.zeros(1, 200, dtype=torch.long))
    task, params = Logistic(2, 2), torch.randn(1, 6, generator=made)
    rolled = Batch(batch.features.roll(1, 1), batch.labels)
    found, moved = (mean_of(task, params, one, shifts=shifting) for one in (batch, rolled))
    apart = float((found - moved).norm())
    assert (apart < 1e-12) is shifting, apart


def test_gradients_are_clipped_so_that_rounding_stays_within_the_bound():
    """The inequality of the proof, by its numbers; and a gradient that is longer than C ends at the
    smaller bound, whatever adds it up."""
    blocks = 2 * RECORDS_ADDED**2 * 2.0**-24
    doubles = 2 * (MOST_SUMMED**2 + 16 * MOST_SUMMED) * 2.0**-53
    assert (CLIPPED_SHARE + blocks + doubles) * (1 + 1e-5) < 1
    batch = Batch(torch.full((1, 1, 3), 100.0), torch.zeros(1, 1, dtype=torch.long))
    for shifting in (False, True):
        found = mean_of(Logistic(2, 2), torch.zeros(1, 6), batch, 0.7, shifting)
        assert 0.7 * CLIPPED_SHARE * 0.99999 <= float(found.norm()) <= 0.7 * CLIPPED_SHARE * 1.00001


def test_a_site_with_more_records_than_the_proof_covers_is_refused():
    run = secure()
    sizes = (MOST_SUMMED + 1, *run.roster.sizes[1:])
    with refuses("too-many-records"):
        _ = replace(run, roster=replace(run.roster, sizes=sizes)).sums


def test_a_task_that_cannot_is_refused():
    """A task that adds up in float32 whatever it is given."""

    class Single(Logistic):
        def clipped_sum(self, params, batch, clip):
            made = super().clipped_sum(params, batch, clip)
            return replace(made, total=made.total.float())

    data = federation(EQUAL)
    run = Trial.of(data, Single(4, 3), fedavg(), Plan(rounds=1, local_steps=1, user_ratio=1.0),
                   Gaussian(noise=1.0), secure=Secure(1))  # fmt: skip
    with refuses("wrong-type: float64"):
        final("simulator", run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"local_steps": 3}, "secure-not-proved: plan.local_steps is 3"),
        ({"algorithm": "scaffold"}, "secure-not-proved: 'scaffold' … 'fedavg'"),
        ({"algorithm": "scaffold-warm"}, "secure-not-proved: 'scaffold-warm'"),
        ({"algorithm": "scaffold-balanced"}, "secure-not-proved: memory"),
        ({"algorithm": "fednova"}, "secure-not-proved: uploads"),
        ({"algorithm": "feddyn"}, "secure-not-proved"),
        ({"privacy": "median"}, "secure-not-proved: clip"),
        ({"privacy": "none"}, "no-noise"),
        ({"privacy": Gaussian(1.0, 0.0)}, "no-noise"),
        ({"privacy": "user", "weighting": "records"}, "secure-not-proved: weights by records"),
        ({"user_ratio": 0.34}, "too-few-sites: secure.colluders is 1 … 2"),
        ({"sums": Secure(5)}, "too-few-sites: secure.colluders is 5 … 6"),
        ({"sums": Secure(1, least=7)}, "too-few-sites: secure.least is 7 … 6"),
    ],
)
def test_what_is_not_proved_is_refused(changes, said):
    """One sentence, before anything is drawn."""
    if "algorithm" in changes:
        changes = {"warm_rounds": None, "rounds": 20, **changes}
    with refuses(said):
        secure(**changes)


@pytest.mark.parametrize("limit", [{"user_epsilon": 2.0}])
def test_sites_may_not_decline_a_secure_sum(limit):
    """A site that declines adds no noise."""
    run = secure()
    with refuses(f"secure-not-proved: privacy.{next(iter(limit))}"):
        replace(run, privacy=run.privacy.changed(**limit))


def test_epsilon_is_solved_for_the_sums():
    """The noise of a site is √(m − k) times smaller than without, and its ε is as asked."""
    data = federation((40,) * 10)
    plan = Plan(rounds=20, local_steps=1, user_ratio=1.0, data_ratio=0.2)
    noises = []
    for sums in (None, Secure(1), Secure(4)):
        result = train(data, Logistic(4, 3), fedavg(), plan, Gaussian(epsilon=1.0), secure=sums)
        noises.append(result.setting.privacy.noise)
        assert 0.99 < result.privacy.towards("server").epsilon <= 1.0
        assert (result.privacy.towards("alone").epsilon is None) == (sums is None)
        assert result.setting.sums is None or result.setting.sums.noise == noises[-1]
    assert noises[1] == pytest.approx(noises[0] / 3, rel=2e-3)
    assert noises[2] == pytest.approx(noises[0] / 6**0.5, rel=2e-3)


def test_a_run_resumes_where_it_stopped(tmp_path):
    """Checkpoints, statement and configuration say what a run without a stop says."""
    data = federation((40,) * 5)
    plan = Plan(rounds=6, local_steps=1, user_ratio=1.0, data_ratio=0.2, checkpoint_every=2, seed=4)
    given = (data, Logistic(4, 3), fedavg(), plan, Gaussian(1.0, 2.0))

    def stop(row):
        if row.round == 3:
            raise KeyboardInterrupt

    whole = train(*given, secure=Secure(1), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(*given, secure=Secure(1), out=tmp_path / "cut", on_round=stop)
    with refuses("configuration-changed: secure"):
        train(*given, secure=Secure(2), out=tmp_path / "cut", resume=True)
    with refuses("configuration-changed: secure"):
        train(*given, out=tmp_path / "cut", resume=True)
    again = train(*given, secure=Secure(1), out=tmp_path / "cut", resume=True)
    assert torch.equal(whole.params, again.params)
    assert whole.privacy.guarantees == again.privacy.guarantees
    assert whole.privacy.towards("server").theorem == "4"
    assert whole.privacy.towards("alone").epsilon > whole.privacy.towards("server").epsilon
    page = page_of(tmp_path / "cut")
    assert "Theorem 4" in page and whole.privacy.towards("alone").words in page
    assert "simulated-sums" in dict(whole.privacy.outside)


def test_a_release_refuses_simulated_sums(tmp_path):
    """One process that sees every upload is no server that sees sums."""
    data = federation((40,) * 5)
    plan = Plan(rounds=2, local_steps=1, user_ratio=1.0, data_ratio=0.2)
    with refuses("release-refused: privacy.release"):
        train(data, Logistic(4, 3), fedavg(), plan, Gaussian(1.0, 2.0, release=True),
              secure=Secure(1), out=tmp_path / "out")  # fmt: skip
