"""A deployed run at its server: :class:`~dpscaffold.training.training.Training` over sites, in an
ordinary run folder.

The folder has one file more than a simulated run's: ``sites.json``, with the run's id, its roster
and everybody's commitments and nonces, written before they matter. A checkpoint follows every
round, for an upload may be acknowledged only once it is on disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpscaffold.config import Gaussian, Run
from dpscaffold.deployment.protocol.agreement import Offer, SchemaSettings
from dpscaffold.deployment.protocol.enrolment import (
    EnrolledRun,
    SignedExchange,
    begin_with,
    offer_to,
    tell_draw,
)
from dpscaffold.deployment.protocol.exchange import ExchangeStopped
from dpscaffold.deployment.protocol.messages import digest
from dpscaffold.deployment.server.agreed import Scorer, model_of, seed_of, setting_of, trained
from dpscaffold.deployment.server.continuing import (
    CONTINUES,
    SITES,
    EarlierRun,
    earlier_run,
    refuse_continued,
    refuse_others,
)
from dpscaffold.deployment.server.prepare import with_fitted
from dpscaffold.deployment.server.secure import SecureSites
from dpscaffold.deployment.server.sites import Patience, Sites, Stalled
from dpscaffold.engine import Count, Draw, Round, State
from dpscaffold.engine.server import server_round
from dpscaffold.engine.state import count_nothing
from dpscaffold.errors import BadInput
from dpscaffold.privacy.page import Statement
from dpscaffold.privacy.seeds import Seed
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.account import PrivacyAccount, account_of
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.history import HistoryRow, MetricValues
from dpscaffold.runs.ledger import WITHIN
from dpscaffold.runs.summary import Summary
from dpscaffold.runs.written import to_toml
from dpscaffold.training.training import Ending, Training, pick_up

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
    refusals: dict[str, int]
    setting: Run
    #: How often each site has taken part.
    participations: tuple[int, ...]


@dataclass
class Deployment:
    """One deployed run: what is offered, to whom, and where it is kept.

    ``config`` is what ``config.toml`` will say; ``stop`` fills with the names of signals that told
    this process to stop (:func:`~dpscaffold.engine.device.stop_signals`); ``records`` are the
    sizes that the noise was solved for, which the sites must then have.
    """

    offer: Offer
    post: SignedExchange
    folder: RunFolder
    config: Mapping[str, Any]
    limits: Gaussian | None
    patience: Patience
    scorer: Scorer | None = None
    say: Say = lambda sentence: None
    observer: Observer | None = None
    bytes_crossed: Callable[[], tuple[int, int]] = lambda: (0, 0)
    reachable: Callable[[], Collection[str] | None] = lambda: None
    stop: list[str] = field(default_factory=list)
    records: Mapping[str, int] | None = None
    #: The scorer of a schema whose steps are all fitted.
    scorer_of: Callable[[SchemaSettings], Scorer | None] = lambda rows: None

    def run(
        self, names: tuple[str, ...], resume: bool, continues: Path | None = None
    ) -> DeploymentResult:
        """Enrol and train, or go on where the folder stands. ``continues`` is the folder of a run
        whose rounds that are left are taken, with other sites."""
        if continues is not None:
            refuse_others(self.offer, self.limits)
        while (place := self.offer.rows.unfitted) is not None:
            done = self._fit(place, names)
            if done.ended != "completed":
                return done
            fitted = (done.setting, done.state.params, done.participations)
            self.offer = with_fitted(self.offer, place, *fitted)
            self.scorer = self.scorer_of(self.offer.rows)
        try:
            if resume and self.folder.holds_run:
                enrolled = self._known(names)
            else:
                enrolled = self._begun(names, continues)
            enrolled = self._enrol(enrolled)
            setting = setting_of(self.offer, enrolled, self.limits)
            given = (setting, enrolled, self.post, self.patience, self._pause)
            engine = Sites(*given) if setting.sums is None else SecureSites(*given, self.folder)
            return DeployedRun(self, setting, engine).train()
        finally:
            self.folder.release()

    def _fit(self, place: int, names: tuple[str, ...]) -> DeploymentResult:
        """The run that fits a step of the preparation; one that was begun goes on."""
        path, step = self.folder.path, self.offer.rows.prepare[place].step
        own = RunFolder(path.with_name(f"{path.name}-preparation-{place + 1}"))
        self.say(f"fitting {step}, step {place + 1} of the preparation, in {own.path}")
        post = replace(self.post, seen={})  # counts of one run; those over all runs are shared
        part = replace(self, offer=self.offer.fitting(place), folder=own, post=post, scorer=None)
        return part.run(names, resume=own.holds_run)

    # --- enrolment

    def _begun(self, names: tuple[str, ...], continues: Path | None) -> EnrolledRun:
        enrolled = EnrolledRun.fresh(self.offer.to_dict(), names, self.records)
        if continues is not None:
            self.folder.check_free()
            earlier = earlier_run(continues, self.offer, names, self.limits)
            enrolled = replace(enrolled, continues=earlier.enrolled.run, after=earlier.round)
        self.folder.begin(to_toml(self.config), self._identity(enrolled))
        if continues is not None:
            self.folder.write_text(CONTINUES, json.dumps({"folder": str(continues.resolve())}))
        self._keep(enrolled)
        return enrolled

    def _identity(self, enrolled: EnrolledRun) -> Identity:
        covers = "the plan; the records are the sites' own"
        return Identity(self.offer.to_dict(), "sites", enrolled.plan, covers)

    def _known(self, names: tuple[str, ...]) -> EnrolledRun:
        refuse_continued(self.folder, "--out")
        self.folder.lock()
        saved = self.folder.read_json(SITES)
        if saved is None:
            raise BadInput(
                "not-a-run", f"{self.folder.path} holds no deployed run ({SITES}); name another"
            )
        enrolled = EnrolledRun.from_dict(saved)
        self.folder.check_same(self._identity(enrolled))
        if enrolled.plan != digest(self.offer.to_dict()):
            raise BadInput(
                "plan-changed",
                f"{self.folder.path} holds a run with another plan; resume it with that",
            )
        self._check_roster(enrolled, names)
        return enrolled

    def _check_roster(self, enrolled: EnrolledRun, names: tuple[str, ...]) -> None:
        """Sites may have been removed since the run began, and others admitted.

        The pool of the draw stays as everybody committed to it: a removed site is passed over where
        it is drawn, as any that stays away, so nobody else is drawn more often than was agreed. An
        admitted one cannot join: with it the pool, and with that what was agreed, would change.
        """
        gone = [name for name in enrolled.names if name not in names]
        new = [name for name in names if name not in enrolled.names]
        if gone and (enrolled.secure or not enrolled.begun or len(gone) == len(enrolled.names)):
            why = "every site has to begin it" if not enrolled.begun else "somebody has to be left"
            why = "secure sums need the keys of all members" if enrolled.secure else why
            raise BadInput(
                "roster-changed",
                f"{self.folder.path} holds a run of {', '.join(enrolled.names)}, and the roster is "
                f"{', '.join(names)}; {why}, so admit {', '.join(gone)} again, or begin a new run",
            )
        for name in gone:
            self.say(f"{name} was removed: the run goes on without it, and it stays in the draw")
        for name in new:
            self.say(
                f"{name} was admitted after the run began, and is not part of it: all sites have "
                f"committed to its draw. To train with {name} now, stop this run and let another "
                f"take its rounds that are left: server run … --out NEW --continue "
                f"{self.folder.path}"
            )

    def _enrol(self, enrolled: EnrolledRun) -> EnrolledRun:
        """Whatever is still missing of offers, commitments and nonces."""
        if not enrolled.commitments:
            enrolled = offer_to(self.post, enrolled)
            self._check_sizes(enrolled)
            self._keep(enrolled)
        if not enrolled.begun:
            if enrolled.continues:
                self._take_over(enrolled)
            enrolled = self._keep(begin_with(self.post, enrolled))
            tell_draw(self.post, enrolled, enrolled.names)
        self.say(f"run {enrolled.run}: {', '.join(enrolled.names)} take part")
        if self.offer.secure is not None:
            voids = self.offer.secure.voids
            self.say(f"epsilon includes {voids} attempts at a sum without a result (secure.voids)")
        return enrolled

    def _take_over(self, enrolled: EnrolledRun) -> None:
        """Everybody has said yes to the rest of an earlier run: from here on that one is over.
        Until then it can be resumed, and a refusal has cost nothing."""
        path = Path(str((self.folder.read_json(CONTINUES) or {}).get("folder")))
        earlier = earlier_run(path, self.offer, enrolled.names, self.limits, enrolled.run)
        if (earlier.enrolled.run, earlier.round) != (enrolled.continues, enrolled.after):
            raise BadInput(
                "earlier-run-changed",
                f"the run in {path} has gone on since it was to be continued after round "
                f"{enrolled.after}; continue it again, with --continue and a new --out",
            )
        earlier.folder.lock()
        try:
            setting = setting_of(self.offer, earlier.enrolled, self.limits)
            earlier.hand_over(enrolled, setting, self.folder)
        finally:
            earlier.folder.release()
        self._say_continued(earlier, enrolled)

    def _say_continued(self, earlier: EarlierRun, enrolled: EnrolledRun) -> None:
        joined = [name for name in enrolled.names if name not in enrolled.earlier]
        self.say(
            f"the run goes on after round {earlier.round} of {earlier.folder.path}, which cannot "
            f"be resumed any more; {', '.join(joined)} joined, and the others grant nothing new"
        )
        for name in earlier.enrolled.names:
            if name not in enrolled.names:
                self.say(f"{name} is not on the roster: it counts no more")

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

    def _pause(self, seconds: float) -> None:
        """The pause before a void round is asked again, which a signal ends."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop:
            time.sleep(min(0.1, seconds))
        if self.stop:
            raise ExchangeStopped("before a void round was asked again")


class DeployedRun:
    """A deployed run whose sites have all enrolled: the engine over them, and the training that
    takes its rounds. A checkpoint follows every round, and only then are its uploads
    acknowledged."""

    def __init__(self, deployment: Deployment, setting: Run, sites: Sites) -> None:
        self.deployment, self.setting, self.sites = deployment, setting, sites
        self.post, self.out = deployment.post, deployment.folder
        self.training = Training(
            run=setting,
            engine=self,
            account=account_of(setting, before=sites.enrolled.after),
            randomness=Randomness(self._seed.value),
            folder=self.out,
            evaluate=self._score,
            on_round=self._remember,
        )
        self.row = HistoryRow(0)

    def train(self) -> DeploymentResult:
        """Take the rounds that are left, and tell the sites how it ended."""
        training, stop = self.training, self.deployment.stop
        plan = self.sites.enrolled.plan
        saved, history = pick_up(self.out, training.account, plan, self._seed, resent=True)
        if saved is not None:
            training.restore(saved, history)
        self.sites.take_up(training.state.round)
        self._status("running", training.account.live(training.state.round))
        try:
            ending = training.advance(stop)
        except Stalled as void:
            ending = Ending("stalled", str(void))
        except ExchangeStopped as where:
            ending = Ending("interrupted", f"stopped by {stop[0]} ({where})")
        return self._finish(ending)

    @property
    def _seed(self) -> Seed:
        """What the participants are drawn from."""
        return seed_of(self.setting, self.sites.enrolled)

    def _score(self, state: State) -> dict[str, float]:
        """The score on public test data, where there are any."""
        scorer = self.deployment.scorer
        return scorer(trained(self.setting, state.output)[1]) if scorer else {}

    def _remember(self, row: HistoryRow) -> None:
        self.row = row

    # --- the engine

    def round(self, state: State, draws: Sequence[Draw], count: Count = count_nothing) -> Round:
        """One round at the sites, with how many answered and how long that took; what they released
        in addition is counted."""
        sites = self.sites
        done = server_round(self.setting, state, draws[0], sites.memories, sites.gather)
        self._count_fresh(draws[0], count)
        measured = {"arrived": len(done.arrived), "round_seconds": sites.last.seconds}
        (found,) = done.uploads
        return replace(done, found=[replace(found, metrics={**measured, **found.metrics})])

    def acknowledge(self, round: int) -> None:
        """The round is on the disk: acknowledge its uploads."""
        self.sites.saved()
        self._name_bad_uploads(round)
        self._status("running", self.row.metrics)
        if self.deployment.observer:
            self.deployment.observer(round, self.row)

    def memory(self) -> dict[str, Any]:
        """What is known of the sites."""
        return {"sites": self.sites.to_dict()}

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Take up what :meth:`memory` gave."""
        self.sites.restore(memory["sites"])

    def norms(self) -> dict[str, float]:
        """The largest norm of each slot of the sites that is known."""
        return self.sites.memories.norms()

    def _count_fresh(self, draw: Draw, count: Count) -> None:
        """The larger of this ledger's count and the site's own: an interrupted participation, and a
        round that was asked again and answered with fresh noise, are releases too."""
        account = self.training.account
        if not isinstance(account, PrivacyAccount):
            return
        names, asked = self.sites.enrolled.names, draw.active.tolist()
        while True:
            behind = [
                user
                for user in asked
                if self.post.seen.get(names[user], 0) > account.account.ledger.participations[user]
            ]
            if not behind:
                return
            count(behind[: self.setting.cohort_size])

    def _norm(self, name: str) -> dict[str, float | None]:
        """The norm of a site's last move, and its bound."""
        norm, bound = self.sites.last.norms.get(name, (None, None))
        return {} if norm is None else {"norm": norm, "largest_honest_norm": bound}

    def _name_bad_uploads(self, round: int) -> None:
        """Say whose upload was not used, so that its people can look for the reason."""
        for name, (norm, bound) in self.sites.last.norms.items():
            if self.sites.last.reasons.get(name) == "bad-upload":
                limit = "" if bound is None else f", and an honest one has at most {bound:.3g}"
                self.deployment.say(
                    f"round {round}: the upload of {name} was not used (bad-upload): its "
                    f"move has the norm {norm:.3g}{limit}"
                )

    # --- the end

    def _finish(self, ending: Ending) -> DeploymentResult:
        training, state = self.training, self.training.state
        account, history = training.account, training.history
        said = account.statement()
        over = ending.how in ("completed", "budget")
        if over:
            self._settle(state)
        self.out.write_summary(
            Summary(
                algorithm=self.setting.label,
                data=f"{len(self.sites.enrolled.names)} sites",
                ended=ending.how,
                message=ending.message,
                rounds=state.round,
                seconds=round(training.seconds, 3),
                final=dict(history[-1]) if history else {},
                run=self.sites.enrolled.run,
                refusals=self.post.refusals,
            )
        )
        if over and self.deployment.offer.fit is None:
            model = model_of(self.deployment.offer.rows, self.setting, state, said)
            model.save(self.out.file(WITHIN))
        self._status(ending.how, account.live(state.round))
        refusals, seen = dict(self.post.refusals), self.post.seen
        return DeploymentResult(
            ending.how,
            ending.message,
            state,
            said,
            history,
            refusals,
            self.setting,
            tuple(seen.get(name, 0) for name in self.sites.enrolled.names),
        )

    def _settle(self, state: State) -> None:
        """Give the model to the sites."""
        try:
            _, reasons = self.sites.settle(trained(self.setting, state.output)[1])
        except ExchangeStopped:
            self.deployment.say("not all sites know that the run is over; --resume tells them")
            return
        for name, reason in reasons.items():
            self.deployment.say(f"{name} did not take the model: {reason}")

    def _status(self, phase: str, spent: MetricValues) -> None:
        """``status.json``, for monitoring."""
        sent, received = self.deployment.bytes_crossed()
        reachable = self.deployment.reachable()
        status = {
            "run": self.sites.enrolled.run,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "phase": phase,
            "round": self.training.state.round,
            "rounds": self.setting.plan.rounds,
            "seconds": round(self.training.seconds, 3),
            "round_seconds": round(self.sites.last.seconds, 3),
            "bytes_sent": sent,
            "bytes_received": received,
            "sites": {
                name: {
                    "participations": self.post.seen.get(name, 0),
                    "last": self.sites.last.reasons.get(name, "answered"),
                    **({} if reachable is None else {"reachable": name in reachable}),
                    **self._norm(name),
                }
                for name in self.sites.enrolled.names
            },
            "refusals": self.post.refusals,
            "epsilon": spent.get("epsilon_server"),
        }
        self.out.write_text("status.json", json.dumps(status, indent=2) + "\n")
