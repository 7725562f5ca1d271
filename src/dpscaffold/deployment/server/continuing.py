"""The rest of a deployed run as a run of its own, with more sites.

The sites of a run have committed to its draw, so nobody can join it. What can be done is to stop
it, and to offer the rounds that are left as another run to everybody on the roster, with a draw of
its own. The model, the server's slots and what is known of the sites go on from the last
checkpoint. Sites that took part grant nothing new (:mod:`dpscaffold.deployment.site.continuing`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dpscaffold.algorithms import Algorithm
from dpscaffold.algorithms.registry import ITERATIVE
from dpscaffold.atomic import is_held
from dpscaffold.config import Gaussian, Run
from dpscaffold.deployment.protocol.agreement import Offer
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.server.agreed import seed_of
from dpscaffold.errors import BadInput
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.account import PrivacyAccount, account_of
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.earlier import CONTINUED, EARLIER, People, keep_earlier, read_people
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.ledger import read_account

SITES = "sites.json"
#: Where a run that continues another one says which.
CONTINUES = "continues.json"


@dataclass(frozen=True)
class EarlierRun:
    """A deployed run that stopped before its last round, to be continued."""

    folder: RunFolder
    enrolled: EnrolledRun
    checkpoint: Checkpoint

    @property
    def round(self) -> int:
        """The last round that its checkpoint contains."""
        return self.checkpoint.state.round

    def start(self, enrolled: EnrolledRun, algorithm: Algorithm) -> Checkpoint:
        """The checkpoint that the rest begins from, for the sites of ``enrolled``.

        A slot that is the mean of the sites' own (SCAFFOLD's c) becomes the mean over the sites of
        today: those that join have zero, and those that left count no more.
        """
        saved, names = self.checkpoint, self.enrolled.names
        mirror = saved.sites["mirror"]
        here = [k for k, user in enumerate(mirror["users"]) if names[user] in enrolled.names]
        slots = {name: value[here] for name, value in mirror["slots"].items()}
        users = [enrolled.names.index(names[mirror["users"][k]]) for k in here]
        server = saved.state.server
        means = {
            name: _mean(slots[name], len(enrolled.names), server.slots[name])
            for name in algorithm.shared
            if name in server.slots
        }
        moved = replace(server, slots={**server.slots, **means})
        return Checkpoint(
            replace(saved.state, server=moved),
            sites=self._known_of(enrolled) | {"mirror": {"users": users, "slots": slots}},
        )

    def _known_of(self, enrolled: EnrolledRun) -> dict[str, Any]:
        """What is known of the sites that go on; counts of one run begin again."""
        sites = self.checkpoint.sites
        known = {n: u for n, u in sites["acknowledged"].items() if n in enrolled.names}
        restore = [name for name in sites["restore"] if name in enrolled.names]
        return {**sites, "acknowledged": known, "restore": restore, "seen": {}}

    def hand_over(self, enrolled: EnrolledRun, setting: Run, new: RunFolder) -> None:
        """Mark this run as continued, after which it cannot be resumed, and write what the rest
        begins from and what was spent before it into its folder. Done again, it ends the same.

        ``setting`` is this run's. Whoever stopped it had seen its outputs and knew its draw, so all
        rounds that it had planned are counted.
        """
        marked = {"run": enrolled.run, "folder": str(new.path.resolve())}
        self.folder.write_text(CONTINUED, json.dumps(marked) + "\n")
        accounts = account_of(setting, self.enrolled.after)
        seed = seed_of(setting, self.enrolled)
        if isinstance(accounts, PrivacyAccount):
            known = (self.enrolled.plan, seed, self.checkpoint.journal)
            accounts.attach(self.folder, *known, stored=True)
            self._count_repeats(enrolled, accounts, setting.cohort_size)
            people = self._people(enrolled)
            accounts.count_rest(Randomness(seed.value))
            keep_earlier(new.path, self.folder.path, people)
        new.save_checkpoint(self.start(enrolled, setting.algorithm))

    def _count_repeats(self, enrolled: EnrolledRun, accounts: PrivacyAccount, most: int) -> None:
        """Count what sites released in the last round beyond this run's ledger: fresh noise for a
        round that was asked again. Rounds that were planned and never run do not make up for it:
        whoever repeats a round takes part in it both times."""
        names, last = self.enrolled.names, self.enrolled.after + accounts.rounds
        counted = read_counts(self.folder.path, names)
        missing = {n: enrolled.earlier.get(n, 0) - counted.get(n, 0) for n in names}
        for time in range(max(missing.values())):
            behind = [user for user, name in enumerate(names) if missing[name] > time]
            for start in range(0, len(behind), most):
                accounts.count_again(last, behind[start : start + most])

    def _people(self, enrolled: EnrolledRun) -> People:
        """Who is who, and the most often that a site takes part in all: what each has granted, or
        what it used where it granted more later and then left. A site that was in an earlier run
        and does not go on with the grant of it has no such rule."""
        counted = read_counts(self.folder.path, self.enrolled.names)
        caps = [*self.enrolled.caps, *enrolled.caps, *(c for c in counted.values() if c)]
        path, before = self.folder.path, set(self.enrolled.names)
        if (path / EARLIER).is_dir():
            caps.append(read_people(path).cap)
        while (path / EARLIER).is_dir():
            before |= set(read_people(path).before)
            path = path / EARLIER
        strange = before & set(enrolled.names) - set(enrolled.earlier)
        ruled = not strange and all(cap > 0 for cap in caps)
        return People(self.enrolled.names, enrolled.names, max(caps) if ruled else 0)


def read_counts(folder: Path, names: tuple[str, ...]) -> dict[str, int]:
    """How often the sites took part in a run and in those that it continues, by its ledgers."""
    counts: dict[str, int] = {}
    for part in read_account(folder).parts:
        assert part.ledger is not None
        took_part = part.ledger.participations.tolist()
        for name, count in zip(part.people or names, took_part, strict=True):
            counts[name] = counts.get(name, 0) + count
    return counts


def _mean(slots: Tensor, users: int, like: Tensor) -> Tensor:
    """The mean of slots (n, P) over ``users``, of which the others have zero."""
    return (slots.double().sum(dim=0) / users).to(like.dtype).reshape(like.shape)


def earlier_run(
    path: Path, offer: Offer, names: tuple[str, ...], limits: Gaussian | None, run: str = ""
) -> EarlierRun:
    """The run in a folder, to be continued by the sites ``names`` under this offer; refuses what
    cannot be. ``run`` is the one that goes on with it, where that is known already."""
    folder = RunFolder(path)
    saved = folder.read_json(SITES) if folder.holds_run else None
    if saved is None:
        raise BadInput(
            "not-a-run", f"--continue is {path}, which holds no deployed run ({SITES}); name one"
        )
    refuse_continued(folder, "--continue", run)
    if not folder.file(".lock").exists() or is_held(folder.file(".lock")):
        raise BadInput(
            "folder-in-use",
            f"--continue is {path}, where another process is at work; stop it first (SIGTERM)",
        )
    refuse_others(offer, limits)
    _refuse_other_plan(folder, offer)
    enrolled, checkpoint = EnrolledRun.from_dict(saved), folder.load_checkpoint()
    if checkpoint is None or not enrolled.begun:
        raise BadInput(
            "no-rounds-yet",
            f"--continue is {path}, where no round is finished yet; go on with --resume, or begin "
            f"a new run",
        )
    if folder.summary().ended in ("completed", "budget") or (
        checkpoint.state.round >= offer.plan.rounds
    ):
        raise BadInput(
            "run-finished", f"--continue is {path}, whose run has no rounds left; begin a new run"
        )
    _check_names(path, enrolled.names, names)
    return EarlierRun(folder, enrolled, checkpoint)


def refuse_continued(folder: RunFolder, option: str, run: str = "") -> None:
    """Refuse a run that goes on as another one than ``run``."""
    marked = folder.read_json(CONTINUED)
    if marked is not None and marked.get("run") != run:
        raise BadInput(
            "run-continued",
            f"{option} is {folder.path}, whose run went on with other sites in "
            f"{marked.get('folder')}; name that folder",
        )


def refuse_others(offer: Offer, limits: Gaussian | None) -> None:
    """Refuse plans of which the rest is not a plan of its own for more sites."""
    of_one_run = ("user_epsilon", "budget_file")
    set_limits = [f"privacy.{name}" for name in of_one_run if getattr(limits, name, None)]
    reasons = {
        "[secure] is given, and the noise of secure sums depends on all members": offer.secure,
        "privacy.epsilon is a table, and the noise of sites with budgets of their own is part of "
        "the plan": offer.noises,
        "schema.prepare has steps that are fitted on the records of the sites of the first "
        "run": offer.rows.unfitted is not None or offer.fit,
        f"{' and '.join(set_limits)} is a limit of one run": set_limits,
        f"algorithm.name is {offer.algorithm.name!r}, and it is not known what a new site means "
        f"for it": offer.algorithm.name not in ITERATIVE,
    }
    for reason, given in reasons.items():
        if given:
            raise BadInput(
                "not-applicable",
                f"--continue is given, but {reason}; begin a new run with the present roster",
            )


def _refuse_other_plan(folder: RunFolder, offer: Offer) -> None:
    """The plan must be the same in every number; most often the noise was solved again."""
    saved, now = folder.described, offer.to_dict()
    before, after = (_noise(tables) for tables in (saved.get("setting", {}), now))
    if before is not None and after is not None and before != after:
        raise BadInput(
            "plan-changed",
            f"--continue is {folder.path}, whose run has privacy.noise = {before!r}, and the plan "
            f"gives {after!r}; the noise of a run cannot change, so set privacy.noise = "
            f"{before!r}, and leave privacy.epsilon out",
        )
    folder.check_same(Identity(now, saved["engine"], saved["data"], ""))


def _noise(tables: Mapping[str, Any]) -> float | None:
    privacy = tables.get("privacy")
    return privacy.get("noise") if isinstance(privacy, Mapping) else None


def _check_names(path: Path, before: tuple[str, ...], now: tuple[str, ...]) -> None:
    if not set(now) - set(before):
        raise BadInput(
            "no-new-site",
            f"--continue is {path}, and the roster ({', '.join(now)}) has no site that is new to "
            f"its run; go on with --resume, which also leaves removed sites out",
        )
    if not set(now) & set(before):
        raise BadInput(
            "roster-changed",
            f"--continue is {path}, a run of {', '.join(before)}, and none of them is on the "
            f"roster; begin a new run",
        )
