"""A state machine over everything that may befall messages, sites and server, in any order."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from deploy.world import World, uploads_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from in_memory import Crash, Delivery
from small import Driven, simulator

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.server.sites import Stalled
from dpscaffold.deployment.site.recovery import recover

FATES = st.sampled_from(
    [
        Delivery(),
        Delivery(lose_ask=True),
        Delivery(lose_answer=True),
        Delivery(repeat=True),
        Delivery(delay=True),
        Delivery(late=True),
    ]
)
SITE = st.sampled_from(["east", "north", "south"])
STEP = st.sampled_from(["checked", "settled", "counted", "computed", "stored"])


class Deployment(RuleBasedStateMachine):
    """A rehearsal of SCAFFOLD, so that where everybody answered the simulator is the oracle."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        privacy = Gaussian(clip=0.7, noise=0.8)
        # Rounds are drawn one by one here, so that a site may miss some; all take part in all.
        self.world = World(self.folder, "scaffold", privacy=privacy, rounds=40, user_ratio=1.0)
        self.world.exchange.attempts = 4
        self.world.enrol()
        self.oracle = Driven(simulator(self.world.setting, chunk=1))
        self.applied: list[str] = []
        self.counts = dict.fromkeys(self.world.names, 0)
        self.complete = True  # every round so far had everybody
        self.behind: set[str] = set()  # sites that have, or had, another state than the server knew
        self.backups: dict[str, Path] = {}
        self.states: dict[str, Path] = {}
        self.left: dict[str, set[str]] = {name: set() for name in self.world.names}
        self.looked = 0

    def uploads(self) -> dict[str, set[str]]:
        """The distinct uploads that have left each site so far."""
        answers = self.world.exchange.answered
        for name, upload in uploads_of(answers[self.looked :]):
            self.left[name].add(upload)
        self.looked = len(answers)
        return {name: set(found) for name, found in self.left.items()}

    def play(self, save: bool = True) -> None:
        world = self.world
        if world.state.round >= 40:
            return
        before = self.uploads()
        known_behind = [n for n in world.names if world.post.seen.get(n, 0) > world.count(n)]
        try:
            done = world.round(save=save)
        except Stalled:
            world.resume()
            return
        finally:
            world.steps = lambda name, step: None
            world.exchange.fate = lambda name, message, attempt: Delivery()
            world.exchange.order = lambda names: names
            for name in known_behind:  # whatever else happens, it gives nothing new
                assert self.uploads()[name] == before[name]
        if save:
            self.complete &= len(done.arrived) == 3
            for user in done.arrived:
                self.applied.append(world.engine.acknowledged[world.names[user]])

    @rule()
    def quiet_round(self) -> None:
        self.play()

    @rule(fates=st.lists(FATES, min_size=1, max_size=9), backwards=st.booleans())
    def stormy_round(self, fates: list[Delivery], backwards: bool) -> None:
        """Messages are lost, repeated, delayed and reordered."""
        left = list(fates)
        self.world.exchange.fate = lambda *_: left.pop() if left else Delivery()
        self.world.exchange.order = lambda names: names[::-1] if backwards else names
        self.play()

    @rule(name=SITE, step=STEP, times=st.integers(1, 5))
    def site_dies(self, name: str, step: str, times: int) -> None:
        left = {"times": times}

        def die(who: str, at: str) -> None:
            if (who, at) == (name, step) and left["times"]:
                left["times"] -= 1
                raise Crash

        self.world.steps = die
        self.play()

    @rule()
    def server_dies_before_its_checkpoint(self) -> None:
        self.play(save=False)
        self.world.resume()

    @rule()
    def server_dies_after_its_checkpoint(self) -> None:
        self.world.resume()

    @rule(name=SITE)
    def back_up(self, name: str) -> None:
        folder = self.folder / f"backup-{name}"
        if not self.world.memory(name).folder.exists():
            return  # lost, and not made again yet
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.world.memory(name).folder, folder)
        self.backups[name] = folder

    @rule(name=SITE)
    def restore_a_run_folder(self, name: str) -> None:
        """An old folder of the run comes back; the ledger stays."""
        if name in self.backups:
            folder = self.world.memory(name).folder
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.backups[name], folder)
            self.complete = False  # the mirror's slots differ from the site's in the last bits

    @rule(name=SITE)
    def lose_a_run_folder(self, name: str) -> None:
        """The run's folder is gone; the ledger stays, and with it the grant."""
        self.world.memory(name).forget()
        self.complete = False

    @rule(name=SITE)
    def back_up_everything(self, name: str) -> None:
        folder = self.folder / f"state-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.world.sites[name].state.path, folder)
        self.states[name] = folder

    @rule(name=SITE)
    def restore_everything(self, name: str) -> None:
        """An old ledger comes back with all the rest: the one thing that is never to be done."""
        if name in self.states:
            self.world.close(name)
            state = self.folder / name / "state"
            shutil.rmtree(state)
            shutil.copytree(self.states[name], state)
            self.world.open(name)
            self.behind.add(name)
            self.counts[name] = self.world.count(name)
            self.complete = False

    @rule(name=SITE)
    def the_operator_recovers(self, name: str) -> None:
        """What the server has seen is reserved, and the rest of the grant with it."""
        if recover(self.world.sites[name].state, name, self.world.policies[name]):
            entry = self.world.ledger(name).runs[self.world.enrolled.run]
            assert entry.participations >= self.world.post.seen.get(name, 0)
            assert not entry.remaining
            self.complete = False

    @rule(name=SITE)
    def a_copy_answers(self, name: str) -> None:
        """A copy of the whole state answers a round, then the original comes back."""
        world, original = self.world, self.world.sites[name]
        copy = self.folder / f"copy-{name}-{world.state.round}"
        if copy.exists():
            return
        shutil.copytree(original.state.path, copy)
        world.open(name, copy)
        self.play()
        world.close(name)
        world.sites[name] = original
        self.behind.add(name)  # it refuses, from now on, what its copy has spent
        self.complete = False

    @invariant()
    def nothing_is_applied_twice(self) -> None:
        assert len(set(self.applied)) == len(self.applied)

    @invariant()
    def ledgers_hold_what_left_and_never_fall(self) -> None:
        world, left = self.world, self.uploads()
        for name in world.names:
            count = world.count(name)
            assert count >= self.counts[name]
            self.counts[name] = count
            if name not in self.behind:
                assert count >= len(left[name])

    @invariant()
    def controls_add_up(self) -> None:
        if not self.behind and not self.world.engine._restore:
            try:
                gap = self.world.gap()
            except Exception as no:  # a restored folder, until the next task fixes it
                assert "state-mismatch" in str(no)
            else:
                assert gap < 1e-5

    @invariant()
    def the_simulator_agrees(self) -> None:
        if self.complete and self.world.state.round:
            reached = self.oracle.drive(self.world.state.round).reached
            assert torch.equal(self.world.state.params, reached.params)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)


def machine(examples: int, steps: int) -> settings:
    """This many histories of this many events."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_whatever_happens_nothing_is_lost_doubled_or_forgotten():
    run_state_machine_as_test(Deployment, settings=machine(15, 20))


@pytest.mark.slow
def test_whatever_happens_in_long_histories():
    run_state_machine_as_test(Deployment, settings=machine(60, 40))
