"""The life of run folders as a state machine: train, kill, resume, copy, restore, edit, compose,
release, budget and more rounds in any order. What is stated is never below what really left.

The oracle (``oracle.py``) counts calls that make uploads and knows ε in closed form.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lifecycle.oracle import Oracle, Release
from world import (
    EDITS,
    Refused,
    budget_spent,
    edit_run,
    has_journal,
    make,
    open_budget,
    spent,
    spent_together,
    watched,
)

ROUNDS = 4
NOISE, LOCAL_STEPS, RATE = 4.0, 2, 0.5
TRUTH = Oracle(noise=NOISE, local_steps=LOCAL_STEPS, rate=RATE)
#: What is stated is a bound computed on a grid; the closed form is exact to this.
EXACT = 1e-6


class Killed(Exception):
    """The process dies here."""


@dataclass
class Run:
    """A run folder and what really left in its history."""

    folder: Path
    kind: str  # "secret", "release", or "seeded": a simulation
    seed: int | None
    draw: object
    budget: bool = False
    rounds: int = ROUNDS
    left: list[Release] = field(default_factory=list)

    @property
    def given(self) -> bool:
        """Whether somebody chose the draw: then ε given the draw is the one to quote."""
        return self.seed is not None and self.kind != "release"


@contextmanager
def recorded(run: Run, dies_in: int | None, after: bool) -> Iterator[None]:
    """Record every release of a run; ``dies_in`` this round, before or after its uploads."""

    def begin(round: int) -> None:
        if round == dies_in and not after:
            raise Killed

    def left(round: int, users: tuple[int, ...]) -> None:
        run.left.append(Release(run.draw, round, users))
        if round == dies_in:
            raise Killed

    with watched(begin, left):
        yield


class LifeCycle(RuleBasedStateMachine):
    """Every step leaves the stated ε at or above the truth, for every folder there is."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="lifecycle-"))
        self.runs: list[Run] = []
        self.snapshots: list[tuple[Run, Path, list[Release]]] = []
        self.charged: list[Release] = []  # all that left under the budget file
        self.allowance = self.root / "budget.jsonl"

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize()
    def open_budget(self) -> None:
        open_budget(self.allowance, epsilon=40.0, delta=0.5)

    # --- what people do

    def go(self, run: Run, dies_in: int | None, after: bool) -> None:
        """Start a run or go on with it."""
        before = len(run.left)
        with recorded(run, dies_in, after), suppress(Killed, Refused):
            make(
                run.folder,
                run.kind,
                rounds=run.rounds,
                local_steps=LOCAL_STEPS,
                user_ratio=RATE,
                noise=NOISE,
                seed=run.seed,
                budget=self.allowance if run.budget else None,
            )
        if run.budget:
            self.charged += run.left[before:]

    @rule(
        kind=st.sampled_from(["secret", "secret", "release", "seeded"]),
        seed=st.sampled_from([None, None, 7]),
        budget=st.booleans(),
        dies_in=st.none() | st.integers(1, 4),
        after=st.booleans(),
    )
    def start(
        self, kind: str, seed: int | None, budget: bool, dies_in: int | None, after: bool
    ) -> None:
        if len(self.runs) >= 4:
            return
        folder = self.root / f"run{len(self.runs)}"
        run = Run(folder, kind, seed, seed if seed is not None else object(), budget)
        self.go(run, dies_in, after)
        self.runs.append(run)

    def chosen(self, which: int) -> Run:
        return self.runs[which % len(self.runs)]

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 9), dies_in=st.none() | st.integers(1, 8), after=st.booleans())
    def resume(self, which: int, dies_in: int | None, after: bool) -> None:
        self.go(self.chosen(which), dies_in, after)

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 9), more=st.integers(1, 3))
    def add_rounds(self, which: int, more: int) -> None:
        run = self.chosen(which)
        run.rounds += more
        self.go(run, None, True)

    @precondition(lambda self: self.runs and len(self.runs) < 4)
    @rule(which=st.integers(0, 9))
    def copy(self, which: int) -> None:
        run = self.chosen(which)
        if run.folder.exists():
            folder = self.root / f"run{len(self.runs)}"
            shutil.copytree(run.folder, folder)
            self.runs.append(replace(run, folder=folder, left=list(run.left)))

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 9))
    def back_up(self, which: int) -> None:
        run = self.chosen(which)
        if run.folder.exists():
            place = self.root / f"backup{len(self.snapshots)}"
            shutil.copytree(run.folder, place)
            self.snapshots.append((run, place, list(run.left)))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 9))
    def restore(self, which: int) -> None:
        """A whole folder put back knows nothing of what left after the copy was made; the budget
        file does, and so what left stays in ``charged``."""
        run, place, left = self.snapshots[which % len(self.snapshots)]
        shutil.rmtree(run.folder)
        shutil.copytree(place, run.folder)
        run.left = list(left)

    # --- what must hold

    @precondition(lambda self: self.runs)
    @rule(
        which=st.integers(0, 9),
        edit=st.sampled_from(["config", "claim", "claim release", "cut", "cut", "remove"]),
        amount=st.integers(1, 20),
    )
    def edit(self, which: int, edit: str, amount: int) -> None:
        """Whatever is changed or taken out of a folder, it does not state less than the truth."""
        run = self.chosen(which)
        if not has_journal(run.folder):
            return
        changed = self.root / "edited"
        shutil.copytree(run.folder, changed)
        edit_run(changed, edit, amount)
        self.check_statement(replace(run, folder=changed))
        for other in self.runs:
            self.check_composition([replace(run, folder=changed), other], True)
        shutil.rmtree(changed)

    @precondition(lambda self: len(self.runs) > 1)
    @rule(one=st.integers(0, 9), other=st.integers(0, 9), fixed=st.booleans())
    def compose(self, one: int, other: int, fixed: bool) -> None:
        self.check_composition([self.chosen(one), self.chosen(other)], fixed)

    def check_composition(self, runs: list[Run], fixed: bool) -> None:
        if runs[0].folder == runs[1].folder:
            return
        try:
            said = spent_together([run.folder for run in runs], fixed)
        except Refused:
            return
        if any(run.kind == "seeded" for run in runs):
            assert said.simulated or not any(said.epsilon.values())
            return
        left = {id(release): release for run in runs for release in run.left}.values()
        given = said.epsilon["given"]
        if given is not None:
            assert given >= TRUTH.given_the_draw(left, said.delta) - EXACT
        for view in ("server", "third_party", "participant"):
            stated = said.epsilon[view]
            if stated is None:
                continue
            truth = TRUTH.over_the_draw(left, said.delta)
            if any(run.given for run in runs) and not said.quotes_given:
                truth = max(truth, TRUTH.given_the_draw(left, said.delta))
            assert stated >= truth - EXACT, (view, fixed)

    def check_statement(self, run: Run) -> None:
        """The folder refuses, says that it is a simulation, or states at least the truth."""
        try:
            said = spent(run.folder)
        except (Refused, FileNotFoundError):
            return
        if run.kind == "seeded":
            assert said.simulated, f"{run.folder.name}: a simulation stated as protected"
            return
        if said.simulated or not said.guarantee:
            return
        exact = TRUTH.given_the_draw(run.left, said.delta)
        assert said.epsilon["given"] >= exact - EXACT
        over = TRUTH.over_the_draw(run.left, said.delta)
        assert said.epsilon["server"] >= over - EXACT
        if run.given:
            assert said.quoted >= exact - EXACT

    @invariant()
    def nothing_is_understated(self) -> None:
        for run in self.runs:
            if run.folder.exists():
                self.check_statement(run)

    @invariant()
    def the_budget_file_holds_all_that_left(self) -> None:
        if not self.charged:
            return
        epsilon, delta = budget_spent(self.allowance)
        assert epsilon >= TRUTH.over_the_draw(self.charged, delta) - EXACT


RULES = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),  # an example is long enough as it is
}


@contextmanager
def life() -> Iterator[LifeCycle]:
    """A state machine that is driven by hand; what must hold is checked at the end too."""
    machine = LifeCycle()
    try:
        machine.open_budget()
        yield machine
        machine.nothing_is_understated()
        machine.the_budget_file_holds_all_that_left()
    finally:
        machine.teardown()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", ["secret", "seeded"])
def test_an_edited_folder_states_no_less(kind: str, edit: str) -> None:
    """Killed after round 3, which is in the journal and in no checkpoint."""
    with life() as machine:
        machine.start(kind, None, False, dies_in=3, after=True)
        for amount in (1, 2, 3):
            machine.edit(0, edit, amount)


def test_a_second_life_of_a_killed_run_is_counted() -> None:
    with life() as machine:
        machine.start("secret", None, True, dies_in=3, after=True)
        machine.resume(0, dies_in=4, after=False)
        machine.resume(0, None, True)
        machine.add_rounds(0, 2)
        released = [release.round for release in machine.runs[0].left]
        assert released == [1, 2, 3, 3, 3, 4, 5, 6]  # the checkpoint is of round 2


@pytest.mark.parametrize("kind", ["secret", "release"])
def test_two_copies_that_both_go_on_are_counted_as_such(kind: str) -> None:
    with life() as machine:
        machine.start(kind, None, False, dies_in=3, after=True)
        machine.copy(0)
        machine.resume(0, None, True)
        machine.resume(1, None, True)
        for fixed in (True, False):
            machine.compose(0, 1, fixed)


def test_runs_that_share_a_given_seed_are_counted_by_who_took_part() -> None:
    with life() as machine:
        for _ in range(2):
            machine.start("secret", 7, False, None, True)
        for fixed in (True, False):
            machine.compose(0, 1, fixed)


def test_a_folder_put_back_does_not_fool_the_budget_file() -> None:
    with life() as machine:
        machine.start("secret", None, True, dies_in=2, after=True)
        machine.back_up(0)
        machine.resume(0, None, True)
        machine.restore(0)
        machine.resume(0, None, True)


def test_random_lives() -> None:
    run_machine(examples=3, steps=8)


@pytest.mark.slow
def test_many_random_lives() -> None:
    run_machine(examples=60, steps=16)


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        LifeCycle,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, derandomize=True, **RULES
        ),
    )
