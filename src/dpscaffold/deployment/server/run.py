"""A deployed run at its server: the rounds of :mod:`~dpscaffold.engines.rounds` over sites, in an
ordinary run folder.

The folder has one file more than a simulated run's: ``sites.json``, with the run's id, its roster
and everybody's commitments and nonces, written before they matter. A checkpoint follows every
round, for an upload may be acknowledged only once it is on disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dpscaffold.deployment.protocol.agreement import Offer
from dpscaffold.deployment.protocol.enrolment import (
    EnrolledRun,
    SignedExchange,
    begin_with,
    offer_to,
    tell_draw,
)
from dpscaffold.deployment.protocol.exchange import ExchangeStopped
from dpscaffold.deployment.protocol.messages import Json
from dpscaffold.deployment.server.agreed import Scorer, model_of, setting_of
from dpscaffold.deployment.server.sites import Patience, Sites, Stalled
from dpscaffold.engines import Draw, State
from dpscaffold.engines.memories import slot_metrics
from dpscaffold.engines.rounds import FinishedRound, rounds
from dpscaffold.errors import BadInput, Diverged
from dpscaffold.models.storage import WITHIN
from dpscaffold.privacy.statement_types import Statement
from dpscaffold.randomness.seeds import Seed
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.account import PrivacyAccount
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.journal import Anchor
from dpscaffold.runs.written import plain, to_toml
from dpscaffold.setting import Setting
from dpscaffold.setting.budget import Budget

CPU = torch.device("cpu")
SITES = "sites.json"

#: Told what happens, one sentence at a time; and after every round, its row.
Say = Callable[[str], None]
Observer = Callable[[int, HistoryRow], None]


@dataclass(frozen=True)
class DeploymentResult:
    """How a deployed run ended: ``completed``, ``interrupted``, ``budget`` or ``stalled``."""

    ended: str
    message: str
    state: State
    statement: Statement
    history: list[HistoryRow]
    gap: float | None
    refusals: dict[str, int]


@dataclass
class Deployment:
    """One deployed run: what is offered, to whom, and where it is kept.

    ``config`` is what ``config.toml`` will say; ``stop`` fills with the names of signals that told
    this process to stop (:func:`~dpscaffold.engines.machine.stop_signals`); ``records`` are the
    sizes that the noise was solved for, which the sites must then have.
    """

    offer: Offer
    post: SignedExchange
    folder: RunFolder
    config: Mapping[str, Any]
    budget: Budget
    patience: Patience
    scorer: Scorer | None = None
    say: Say = lambda sentence: None
    observer: Observer | None = None
    bytes_crossed: Callable[[], tuple[int, int]] = lambda: (0, 0)
    stop: list[str] = field(default_factory=list)
    records: Mapping[str, int] | None = None
    history: list[HistoryRow] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, names: tuple[str, ...], resume: bool) -> DeploymentResult:
        """Enrol and train, or go on where the folder stands."""
        if self.offer.plan.max_rounds is not None:
            raise BadInput(
                "not-applicable",
                "plan.max_rounds is given, and sites agree to the rounds of one offer; leave it "
                "out",
            )
        try:
            if resume and self.folder.holds_run:
                enrolled = self._known(names)
            else:
                enrolled = self._begun(names)
            enrolled = self._enrol(enrolled)
            setting = setting_of(self.offer, enrolled, self.budget)
            return self._train(setting, enrolled)
        finally:
            self.folder.release()

    # --- enrolment

    def _begun(self, names: tuple[str, ...]) -> EnrolledRun:
        enrolled = EnrolledRun.fresh(self.offer.to_dict(), names)
        identity = Identity(enrolled.plan, "the plan; the records are the sites' own", "sites")
        self.folder.begin(to_toml(self.config), identity, self.offer.to_dict())
        self._keep(enrolled)
        return enrolled

    def _known(self, names: tuple[str, ...]) -> EnrolledRun:
        self.folder.lock()
        self.folder.check_setting(self.offer.to_dict())
        saved = self.folder.read_json(SITES)
        if saved is None:
            raise BadInput(
                "not-a-run", f"{self.folder.path} holds no deployed run ({SITES}); name another"
            )
        enrolled = EnrolledRun.from_dict(saved)
        if enrolled.plan != EnrolledRun.fresh(self.offer.to_dict(), names).plan:
            raise BadInput(
                "plan-changed",
                f"{self.folder.path} holds a run with another plan; resume it with that",
            )
        if enrolled.names != names:
            raise BadInput(
                "roster-changed",
                f"{self.folder.path} holds a run of {', '.join(enrolled.names)}, and the roster is "
                f"{', '.join(names)}; resume it with its own (--without leaves sites out)",
            )
        return enrolled

    def _enrol(self, enrolled: EnrolledRun) -> EnrolledRun:
        """Whatever is still missing of offers, commitments and nonces."""
        if not enrolled.commitments:
            enrolled = offer_to(self.post, enrolled)
            self._check_sizes(enrolled)
            self._keep(enrolled)
        if not enrolled.begun:
            enrolled = self._keep(begin_with(self.post, enrolled))
            tell_draw(self.post, enrolled, enrolled.names)
        self.say(f"run {enrolled.run}: {', '.join(enrolled.names)} take part")
        return enrolled

    def _check_sizes(self, enrolled: EnrolledRun) -> None:
        """Nothing has begun yet, so a refusal costs no site anything."""
        if enrolled.hides_sizes or self.records is None:
            return
        said = dict(zip(enrolled.names, enrolled.sizes, strict=True))
        if dict(self.records) != said:
            shown = ", ".join(f"{name} = {size}" for name, size in said.items())
            raise BadInput(
                "sizes-differ",
                f"the noise was solved for other sizes than the sites have; set deploy.records to "
                f"{{ {shown} }}",
            )

    def _keep(self, enrolled: EnrolledRun) -> EnrolledRun:
        self.folder.write_text(SITES, json.dumps(enrolled.to_dict()) + "\n")
        return enrolled

    # --- rounds

    def _train(self, setting: Setting, enrolled: EnrolledRun) -> DeploymentResult:
        engine = Sites(setting, enrolled, self.post, self.patience, self._pause)
        accounts = PrivacyAccount(setting)
        state = self._pick_up(setting, engine, accounts)
        streams = Randomness(self._seed(setting, enrolled).value)

        def draw(round: int) -> Draw | None:
            return accounts.draw(streams, round)

        ended, message = "completed", ""
        started = time.perf_counter() - self.seconds
        self._status(engine, state, "running")
        try:
            for done in rounds(setting, engine, draw, state):
                state = done.state
                self.seconds = time.perf_counter() - started
                self._after(done, engine, accounts, setting)
                if self.stop and state.round < setting.plan.rounds:
                    raise ExchangeStopped(f"after round {state.round}")
        except Stalled as void:
            ended, message = "stalled", str(void)
        except ExchangeStopped as where:
            ended, message = "interrupted", f"stopped by {self.stop[0]} ({where})"
        if accounts.refusal:
            ended, message = "budget", accounts.refusal
        return self._finish(engine, accounts, state, ended, message)

    def _pause(self, seconds: float) -> None:
        """The pause before a void round is asked again, which a signal ends."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop:
            time.sleep(min(0.1, seconds))
        if self.stop:
            raise ExchangeStopped("before a void round was asked again")

    def _seed(self, setting: Setting, enrolled: EnrolledRun) -> Seed:
        """What the participants are drawn from: the seed that all sites made, or a rehearsal's.

        Neither is a secret of this folder, so the mark needs no key: it is made again on resume.
        """
        if setting.secret:
            return Seed("sites", enrolled.seed, key="")
        return replace(setting.seed(), key="")

    def _pick_up(self, setting: Setting, engine: Sites, accounts: PrivacyAccount) -> State:
        plan, seed = engine.enrolled.plan, self._seed(setting, engine.enrolled)
        saved = self.folder.load_checkpoint()
        if saved is None:
            accounts.attach(self.folder, plan, seed, stored=True)
            self.folder.rewind_metrics(0)
            return State.initial(setting, CPU)
        state = State.from_dict(saved["state"], CPU)
        journal = saved["journal"]
        anchor = Anchor.read(journal, "checkpoint.pt") if journal is not None else None
        accounts.attach(self.folder, plan, seed, state.round, anchor, stored=True)
        engine.restore(saved["sites"])
        self.seconds = saved["seconds"]
        self.history = self.folder.rewind_metrics(state.round)
        return state

    def _after(
        self, done: FinishedRound, engine: Sites, accounts: PrivacyAccount, setting: Setting
    ) -> None:
        """Count what was released, evaluate, save, and only then acknowledge."""
        state = done.state
        self._count(done, engine, accounts)
        if not bool(torch.isfinite(state.params).all()):
            streams = Randomness(self._seed(setting, engine.enrolled).value)
            accounts.count_rest(streams)  # its outputs have stopped it
            raise Diverged(
                f"the run diverged at round {state.round}: the parameters are no longer finite; "
                f"lower plan.learning_rate or privacy.noise; the last checkpoint is kept"
            )
        metrics: dict[str, float | None] = {
            "arrived": len(done.gathered.arrived),
            "round_seconds": engine.last.seconds,
            **done.gathered.metrics,
            **accounts.live(done.number),
        }
        every = setting.plan.evaluate_every
        if done.number % every == 0 or done.number == setting.plan.rounds:
            metrics |= self.scorer(state.output) if self.scorer else {}
            metrics |= slot_metrics(setting.algorithm, state.server, engine.memories)
            row = HistoryRow(done.number, plain(metrics))
            self.history.append(row)
            self.folder.append_metrics(row)
        self._checkpoint(state, engine, accounts)
        engine.saved()
        self._status(engine, state, "running")
        if self.observer:
            self.observer(done.number, HistoryRow(done.number, plain(metrics)))

    def _count(self, done: FinishedRound, engine: Sites, accounts: PrivacyAccount) -> None:
        """The larger of this ledger's count and the site's own: an interrupted participation, and a
        round that was asked again and answered with fresh noise, are releases too."""
        if accounts.run is None:
            return
        names = engine.enrolled.names
        while True:
            behind = [
                user
                for user in done.draw.active.tolist()
                if engine.post.seen.get(names[user], 0) > accounts.ledger.participations[user]
            ]
            if not behind:
                return
            accounts.count_again(done.number, behind)

    def _checkpoint(self, state: State, engine: Sites, accounts: PrivacyAccount) -> None:
        anchor = accounts.anchor
        self.folder.save_checkpoint(
            {
                "state": state.to_dict(),
                "sites": engine.to_dict(),
                "journal": vars(anchor) if anchor else None,
                "seconds": self.seconds,
            }
        )

    # --- the end

    def _finish(
        self, engine: Sites, accounts: PrivacyAccount, state: State, ended: str, message: str
    ) -> DeploymentResult:
        said = accounts.statement()
        accounts.write_statement(self.folder, said)
        over = ended in ("completed", "budget")
        gap = self._settle(engine, state, said, over) if over else None
        summary = {
            "algorithm": engine.setting.label,
            "data": f"{len(engine.enrolled.names)} sites",
            "ended": ended,
            "message": message,
            "rounds": state.round,
            "seconds": round(self.seconds, 3),
            "final": self.history[-1].to_json() if self.history else {},
            "run": engine.enrolled.run,
            "refusals": self.post.refusals,
            "control_gap": gap,
        }
        self.folder.write_text("summary.json", json.dumps(plain(summary), indent=2) + "\n")
        if over:
            model_of(self.offer.rows, engine.setting, state, said).save(self.folder.file(WITHIN))
        self._status(engine, state, ended)
        return DeploymentResult(
            ended, message, state, said, self.history, gap, dict(self.post.refusals)
        )

    def _settle(self, engine: Sites, state: State, said: Statement, over: bool) -> float | None:
        """Give the model to the sites; M·c − Σc_i where all of them share their slots."""
        told: dict[str, Json] = {"server": plain(said.server.to_json())}
        try:
            answers, reasons = engine.settle(over, told, state.output)
        except ExchangeStopped:
            self.say("not all sites know that the run is over; --resume tells them")
            return None
        for name, reason in reasons.items():
            self.say(f"{name} did not take the model: {reason}")
        gaps = []
        for slot, c in state.server.slots.items():
            held = [signed.vectors.get(f"slot.{slot}") for signed in answers.values()]
            known = [vector for vector in held if vector is not None]
            if len(known) == len(engine.enrolled.names):
                total = np.sum([vector.astype(np.float64) for vector in known], axis=0)
                gaps.append(float(np.abs(len(known) * c.numpy().astype(np.float64) - total).max()))
        return max(gaps) if gaps else None

    def _status(self, engine: Sites, state: State, phase: str) -> None:
        """``status.json``, for monitoring."""
        sent, received = self.bytes_crossed()
        status = {
            "run": engine.enrolled.run,
            "phase": phase,
            "round": state.round,
            "rounds": engine.setting.plan.rounds,
            "seconds": round(self.seconds, 3),
            "round_seconds": round(engine.last.seconds, 3),
            "bytes_sent": sent,
            "bytes_received": received,
            "sites": {
                name: {
                    "participations": self.post.seen.get(name, 0),
                    "last": engine.last.reasons.get(name, "answered"),
                }
                for name in engine.enrolled.names
            },
            "refusals": self.post.refusals,
        }
        self.folder.write_text("status.json", json.dumps(status, indent=2) + "\n")
