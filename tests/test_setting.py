"""A setting is checked as a whole, and what it derives is what engines use and accountants read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from small import UNEQUAL, federation, setting
from stated import over_draw
from torch import nn

from dpscaffold.algorithms import ITERATIVE, fedprox, with_momentum
from dpscaffold.config import make_run, solve_noise
from dpscaffold.config.gaussian import Gaussian, NoisedStep
from dpscaffold.federation import Federation, Records
from dpscaffold.federation.roster import Roster
from dpscaffold.tasks import Logistic, Mlp, ModuleTask


def test_the_derived_numbers():
    """m = ⌊lM⌋, b_i = ⌊sR_i⌋ and the warm rounds."""
    run = setting("scaffold", "logistic", "fixed", user_ratio=0.5, data_ratio=0.5)
    assert run.cohort_size == 3 and run.batch_sizes.tolist() == [n // 2 for n in UNEQUAL]


@pytest.mark.parametrize(("ratio", "rounds"), [(0.2, 20), (0.5, 8), (1.0, 4), (0.3, 13)])
def test_the_warm_start_takes_four_over_l_rounds_by_default(ratio, rounds):
    """round(4/l), for the algorithms that warm up; none for the others."""
    assert (
        setting("scaffold-warm", user_ratio=ratio, warm_rounds=None, rounds=50).warm_rounds
        == rounds
    )
    assert setting("scaffold-warm", user_ratio=ratio, warm_rounds=2, rounds=50).warm_rounds == 2
    assert setting("scaffold", user_ratio=ratio, warm_rounds=None, rounds=50).warm_rounds == 0


def test_warm_rounds_that_leave_no_round_are_refused():
    """The warm start alone would take the whole run; the message says how long it is."""
    for plan in ({"warm_rounds": 4, "rounds": 4}, {"warm_rounds": None, "rounds": 8}):
        with refuses(f"no-rounds-left: plan.rounds is {plan['rounds']}"):
            setting("scaffold-warm", **plan)
    setting("scaffold", warm_rounds=4, rounds=4)


@pytest.mark.parametrize(("ratio", "steps"), [(0.2, 5), (1 / 3, 3), (0.4, 2), (1.0, 1)])
def test_fedsgd_takes_one_pass(ratio, steps):
    """K = round(1/s); another K is an error that names the right one."""
    data = federation((20, 20))
    setting("fedsgd", "logistic", None, data, data_ratio=ratio, local_steps=steps)
    with refuses(f"one-pass-steps: plan.local_steps is {steps + 1} … use {steps}"):
        setting("fedsgd", "logistic", None, data, data_ratio=ratio, local_steps=steps + 1)


def test_empty_rounds_and_batches_are_refused():
    """⌊lM⌋ = 0 and ⌊sR_i⌋ = 0, before anything runs."""
    with refuses("no-participants: plan.user_ratio is 0.1"):
        setting(user_ratio=0.1)
    with refuses("empty-batch: plan.data_ratio is 0.2 … user 2"):
        setting(data_ratio=0.2)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Logistic(7, 3), "task-failed: 'logistic'"),
        (Mlp(7, 3, hidden=2), "task-failed: 'mlp'"),
        (ModuleTask(nn.Linear(9, 3)), "task-failed: 'module'"),
        (Logistic(4, 2), "wrong-scores: 'logistic'"),
        (Logistic(4, 4), "wrong-scores: 'logistic'"),  # it could predict a class without a name
        (ModuleTask(nn.Linear(4, 1)), "wrong-scores: 'module'"),
    ],
)
def test_a_task_that_does_not_fit_the_federation_is_refused(task, message):
    """Wrong numbers of features or classes are found before the first round, not by a traceback in
    it."""
    with refuses(message):
        setting("fedavg", task)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip": 0}, "out-of-range: privacy.clip is 0"),
        ({"clip": -1.0}, "out-of-range: privacy.clip is -1.0"),
        ({"clip": float("nan")}, "out-of-range: privacy.clip is nan"),
        ({"clip": True}, "not-a-number: privacy.clip is True"),
        ({"clip": "mean"}, "not-a-number: privacy.clip is 'mean'"),
        ({"clip": None}, "not-a-number: privacy.clip is None"),
        (
            {"clip": float("inf"), "noise": 1.0},
            "clip-infinite: privacy.clip is inf … privacy.noise is 1.0",
        ),
        ({"noise": -0.1}, "out-of-range: privacy.noise is -0.1"),
        ({"noise": float("nan")}, "not-a-number: privacy.noise is nan"),
        ({"noise": float("inf")}, "not-a-number: privacy.noise is inf"),
        ({"sampling": "shuffle"}, "unknown-choice: privacy.sampling is 'shuffle'"),
        ({"unit": "device"}, "unknown-choice: privacy.unit is 'device'"),
    ],
)
def test_a_mechanism_that_means_nothing_is_refused(values, message):
    """Clips, noises and names out of range, and noise without a finite clip to scale it by."""
    with refuses(message):
        Gaussian(**values)


def test_the_scale_is_the_papers():
    """2Cσ_g/b, or 2Cσ_g towards users, or nothing without noise."""
    assert Gaussian(clip=1.5, noise=60).scale(1.5, 800) == pytest.approx(2 * 1.5 * 60 / 800)
    assert Gaussian(clip=1.5, noise=60, unit="user").scale(1.5, 800) == pytest.approx(180)
    assert Gaussian(clip=float("inf"), noise=0).scale(float("inf"), 800) == 0


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf"), "much"])
def test_a_pull_that_means_nothing_is_refused(mu):
    """FedProx's μ is a finite number, 0 or more."""
    with refuses("not-a-number|out-of-range: algorithm.mu is"):
        fedprox(mu)


@pytest.mark.parametrize("algorithm", ITERATIVE)
def test_what_is_accounted_is_what_runs(algorithm):
    """The description for the accountant repeats the very numbers that engines use.

    No privacy, no description.
    """
    run = setting(algorithm, "logistic", Gaussian(clip=0.5, noise=2.0, sampling="poisson"))
    said = run.describe()
    assert (said.rounds, said.local_steps, said.users, said.cohort_size) == (
        4,
        3,
        6,
        run.cohort_size,
    )
    assert (said.noise, said.clip, said.sampling, said.unit) == (2.0, 0.5, "poisson", "record")
    assert said.memory == run.algorithm.memory
    for user, (size, batch) in enumerate(zip(UNEQUAL, run.batch_sizes.tolist(), strict=True)):
        group = said.groups[said.place(user)]
        assert (group.records, group.batch) == (size, batch)
    assert setting(algorithm).describe() is None


def test_labels_name_the_algorithm_and_its_privacy():
    """As figures and tables show them."""
    assert setting("scaffold-warm", "logistic", "fixed").label == "DP-SCAFFOLD-warm"
    assert setting("fedavg").label == "FedAvg"


def test_a_seeded_run_is_reproducible_and_a_secret_one_is_not():
    """The setting hands out the streams that its privacy asks for."""
    assert not setting("fedavg", "logistic", "fixed").randomness().secret
    assert setting("fedavg", "logistic", Gaussian(noise=1.0, secret=True)).randomness().secret
    assert torch.is_tensor(setting("fedavg").batch_sizes)


def test_no_record_can_be_reached_from_a_setting():
    """Whatever a setting holds, to any depth, none of it has the records' numbers in it."""
    data = federation()
    run = setting("scaffold", "logistic", "fixed", data)
    plain = make_run(data.roster, run.task, run.algorithm, run.plan, run.privacy)
    seen, todo = set(), [plain]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        assert not isinstance(value, Federation | Records)
        if isinstance(value, torch.Tensor):
            assert value.numel() <= max(data.users, run.task.parameters)
        if isinstance(value, Mapping):
            todo += list(value.values())
        elif isinstance(value, list | tuple | set):
            todo += list(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            todo += list(vars(value).values())
    assert len(seen) > 20


def test_a_setting_is_calibrated_to_an_epsilon():
    """The noise of ε = 1 towards the server costs at most that and not much less, for users of
    unequal sizes too; everything else stays."""
    run = setting("scaffold", "logistic", "poisson", federation((90, 40, 300, 55, 70, 120)))
    solved = solve_noise(run, 1.0)
    assert 0.98 < over_draw(solved.describe()) <= 1.0
    assert solved.privacy == run.privacy.changed(noise=solved.privacy.noise)
    assert (solved.plan, solved.algorithm, solved.roster) == (run.plan, run.algorithm, run.roster)
    with refuses("no-privacy"):
        solve_noise(setting("scaffold"), 1.0)


def test_the_budget_is_part_of_the_description():
    """Caps and declining reach the accountant from the setting itself."""
    base = setting("fedavg", "logistic", "fixed")
    limited = base.privacy.changed(delta=1e-4, user_epsilon=2.0)
    said = replace(base, privacy=limited).describe()
    assert said.delta == 1e-4 and said.declines is not None


def test_settings_tell_themselves_apart_in_words():
    """to_dict differs wherever two runs differ: a number, a loss, a limit."""
    base = setting(fedprox(0.1), "logistic", "fixed")
    others = [
        replace(base, algorithm=fedprox(50.0)),
        replace(base, algorithm=with_momentum(fedprox(0.1))),
        replace(base, plan=base.plan.changed(seed=3)),
        replace(base, privacy=base.privacy.changed(noise=9.0)),
        replace(base, privacy=base.privacy.changed(user_epsilon=2.0)),
        replace(base, task=Mlp(4, 3, hidden=2)),
    ]
    told = [json.dumps(one.to_dict(), sort_keys=True) for one in (base, *others)]
    assert len(set(told)) == len(told)
    assert told[0] == json.dumps(
        setting(fedprox(0.1), "logistic", "fixed").to_dict(), sort_keys=True
    )


def test_a_roster_that_means_nothing_is_refused():
    """Nobody, an empty user, names that do not match."""
    schema = federation().schema
    for sizes, names in (((), ()), ((3, 0), ()), ((3, 4), ("one",))):
        with refuses("count-differs|user-without-records: roster"):
            Roster(sizes, names, schema)


@pytest.mark.parametrize("given", ["epsilon", "calibrated"])
def test_what_is_accounted_has_the_noise_that_was_solved_for(given):
    """A description that was made before the noise was known would state a smaller ε."""
    if given == "epsilon":
        solved = setting("scaffold", privacy=Gaussian(clip=1.0, epsilon=3.0))
    else:
        base = setting("scaffold", privacy=Gaussian(clip=1.0, noise=50.0))
        _ = base.mechanism
        solved = solve_noise(base, 3.0)
    assert solved.privacy.noise != 1.0 and solved.privacy.epsilon is None
    assert solved.mechanism.noise == solved.privacy.noise
    assert solved.mechanism == solved.describe() == replace(solved).describe()
    assert replace(solved, privacy=Gaussian(clip=1.0, noise=7.0)).mechanism.noise == 7.0


def test_configurations_and_offers_keep_every_field_of_a_mechanism() -> None:
    """A field that was lost on the way would silently be the default there."""
    step = NoisedStep(2.0, 3.0, "poisson", "user", secret=True)
    for name in NoisedStep.model_fields:
        assert getattr(step, name) != getattr(NoisedStep(), name)
    assert NoisedStep(**json.loads(json.dumps(step.stored()))) == step
    assert Gaussian(noise=1.0, delta=1e-3).with_step(step).step == step


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"noise": "3"}, "not-a-number"),
        ({"noise": True}, "not-a-number"),
        ({"secret": 1}, "not-true-or-false"),
        ({"clip": "mean"}, "not-a-number"),
        ({"unit": "site"}, "unknown-choice"),
        ({"noise": -1.0}, "out-of-range"),
        ({"epsilon": 1.0}, "unknown-key"),
        ({"colour": "red"}, "unknown-key"),
    ],
)
def test_a_stored_mechanism_is_checked(change, code) -> None:
    with refuses(code):
        NoisedStep(**{**NoisedStep(noise=3.0).stored(), **change})
