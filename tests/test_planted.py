"""Every privacy mistake that was found in other software, or in ours, planted: each is caught.

What a game can see, ``dpscaffold audit`` catches (``tests/audit/test_audit.py`` plants it there).
What no game can see, because it is done between runs, on the disk or in words, is planted here, and
a test that passes without it must then fail. docs/security.md has the table of both, which is held
to what is there.
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data import test_preparation
from scipy.stats import binom
from statistical import test_secret_noise
from training import test_crashes, test_release, test_resuming

from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.privacy import THIRD_PARTY, adversary, describe, noise_seen
from dpscaffold.randomness.streams import NoiseStreams
from dpscaffold.runs import ledger as runledger

ROOT = Path(__file__).parents[1]
STATEMENT = importlib.import_module("dpscaffold.privacy.statement")


def rounds_are_forgotten(monkeypatch):
    """A round that was lost and run again counts once."""
    real = runledger.Account.take
    monkeypatch.setattr(
        runledger.Account,
        "take",
        lambda self, line: None if line.get("again") else real(self, line),
    )


def declines_are_unknown(monkeypatch):
    """The accountant takes everybody who was drawn to have taken part."""
    real = adversary._not_hidden_by_others
    monkeypatch.setattr(
        adversary, "_not_hidden_by_others", lambda run, who: real(replace(run, declines=None), who)
    )


def no_lock(monkeypatch):
    """Whoever comes may write."""
    from dpscaffold.runs import folder as runfolder

    monkeypatch.setattr(runfolder, "hold", lambda descriptor: None)


def a_seed_is_a_secret(monkeypatch):
    """A statement that takes seeded noise for noise."""
    real = STATEMENT.state
    from dpscaffold.runs import account as accounts
    from dpscaffold.runs import stating

    def bold(parts, facts):
        return real(parts, replace(facts, seeded=False))

    for module in (accounts, runledger):
        monkeypatch.setattr(module, "state", bold)
    monkeypatch.setattr(stating, "state_parts", bold)


def one_seed_for_two_runs(monkeypatch):
    """Runs that share their noise are taken for independent ones."""
    monkeypatch.setattr(STATEMENT, "shared_noise", lambda parts: None)


def any_data_will_do(monkeypatch):
    """A digest that does not look at the labels."""
    real = Federation.digest

    def blind(self):
        tables = [replace(t, labels=t.labels.clone().zero_()) for t in (self.train, self.test)]
        return real(replace(self, train=tables[0], test=tables[1]))

    monkeypatch.setattr(Federation, "digest", blind)


def single_precision(monkeypatch):
    """Secret noise in float32, so that nothing is rounded to a grid, in scripts or step by step."""
    proper = NoiseStreams.__init__

    def narrow(self, streams, size):
        proper(self, streams, size)
        self._dtype = np.float32

    monkeypatch.setattr(NoiseStreams, "__init__", narrow)


def words_decide(monkeypatch):
    """Whether a step is harmless is read in its sentence."""
    real = STATEMENT._outside

    def trusting(parts, facts, *more):
        kept = tuple(step for step in facts.preparation if "no fit" not in step.sentence)
        return real(parts, replace(facts, preparation=kept), *more)

    monkeypatch.setattr(STATEMENT, "_outside", trusting)


def crashed(tmp_path):
    data = test_crashes.synthetic(**test_crashes.DATA)
    test_crashes.test_every_epsilon_counts_what_was_lost(
        data, tmp_path, "completed", "after the round", test_crashes.SECRET, (8,)
    )


def intruded(tmp_path):
    data = test_crashes.synthetic(**test_crashes.DATA)
    with pytest.MonkeyPatch.context() as patch:
        test_crashes.test_a_second_run_in_one_folder_is_refused_for_the_life_of_the_first(
            data, tmp_path, patch
        )


def resumed(tmp_path):
    data = test_crashes.synthetic(**test_crashes.DATA)
    test_resuming.test_one_record_changed_is_other_data(
        data, tmp_path, test_resuming.NOISY, "train"
    )


def declined(tmp_path):
    run = describe(
        rounds=4, local_steps=1, users=9, cohort_size=3, records=50, batch_sizes=10, noise=4.0,
        memory=False, one_sum=True, declines="a budget",
    )  # fmt: skip
    assert noise_seen(run, THIRD_PARTY).theorem == "1"


def told_apart(tmp_path):
    """The float attack, with fewer uploads than its own test has."""
    right = test_secret_noise.rightly_named(secret=True, trials=40)
    assert right <= binom.isf(1e-6, 40, 0.5)


#: A mistake → the test that fails with it.
PLANTED = {
    rounds_are_forgotten: crashed,
    declines_are_unknown: declined,
    no_lock: intruded,
    a_seed_is_a_secret: test_release.test_a_simulation_says_so_before_anything_else,
    one_seed_for_two_runs: test_release.test_two_runs_of_one_seed_promise_nothing_together,
    any_data_will_do: resumed,
    single_precision: told_apart,
    words_decide: lambda folder: (
        test_preparation.test_a_column_cannot_talk_its_way_into_the_guarantee(folder, False)
    ),
}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, marks=[pytest.mark.slow] * (mistake is single_precision))
        for mistake in PLANTED
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_planted_mistake_is_caught(tmp_path, monkeypatch, mistake):
    """Without the mistake the check passes; with it it fails, or a second defence steps in."""
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    PLANTED[mistake](tmp_path / "without")
    mistake(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, BadInput)):
        PLANTED[mistake](tmp_path / "with")


def named_in_the_docs() -> set[tuple[str, str]]:
    """(file, test) of every row of the table."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.split("| mistake |")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    found: set[tuple[str, str]] = set()
    for row in rows:
        here = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert here, f"nothing catches: {row}"
        found |= set(here)
    return found


def functions(path: Path) -> set[str]:
    """Every function of a file."""
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}


def test_the_table_of_mistakes_names_tests_that_are_there_and_all_that_are_planted():
    named = named_in_the_docs()
    for file, test in named:
        assert test in functions(ROOT / file), f"{file} has no {test}"
    planted = {mistake.__name__ for mistake in PLANTED}
    assert planted == {test for file, test in named if file == "tests/test_planted.py"}
    text = (ROOT / "tests/audit/test_audit.py").read_text()
    section = text.split("# --- planted mistakes")[1].split("# --- one run")[0]
    games = set(re.findall(r"^def (test_\w+)", section, re.MULTILINE))
    assert games <= {test for file, test in named if file == "tests/audit/test_audit.py"}
