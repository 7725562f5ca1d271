"""A site's own model: the common model of a finished run, fitted further to the site's records.

Nothing here is sent. What is fitted without noise, and every number about it, stays at the site. A
model of noised steps may leave: its ε is in the site's ledger before the first step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dpscaffold.algorithms.mean_regularised import given_out
from dpscaffold.deployment.protocol.messages import Refused, Vectors, digest, fresh_id
from dpscaffold.deployment.site.file import (
    FINE_TUNING,
    SiteFile,
    SiteGrant,
    Terms,
    read_site_file,
)
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.memory import RunMemory, StateFolder
from dpscaffold.deployment.site.model import finished_run, stored_model
from dpscaffold.deployment.site.secure import sums_of
from dpscaffold.deployment.site.work import OfferedWork, opener
from dpscaffold.errors import BadInput
from dpscaffold.models.model import Model
from dpscaffold.models.noised import (
    NAME,
    NoisedSteps,
    composed_personal,
    noised_fit,
    steps_after,
)
from dpscaffold.models.personal import (
    SitesCompared,
    Strength,
    compare_rows,
    noised_personal,
    personal_model,
    read_site,
    split,
)
from dpscaffold.privacy import Mechanism, statement
from dpscaffold.privacy.further import FurtherRelease, with_further
from dpscaffold.privacy.showing import round_up
from dpscaffold.privacy.statement_types import Statement
from dpscaffold.setting.gaussian import Gaussian
from dpscaffold.tasks.near import SiteRows

#: What is said of the three numbers of a deployed site.
STAYS = (
    "Local, global and personal metrics are computed from this site's records as they are: ε does "
    "not cover them, nor the local and personal models. Nothing of it is sent: keep it at the site."
)
#: What is said of test records that the common model has seen.
SEEN = (
    "The test records are a fifth of this site's own, which the run trained on too (with noise); "
    "name a file with other labelled rows for an independent comparison."
)


@dataclass(frozen=True)
class FinishedSite:
    """A site after a run: the common model, the site's records, and its own model where the run
    trained one."""

    file: SiteFile
    memory: RunMemory
    work: OfferedWork
    model: Model
    rows: SiteRows
    own: Tensor | None

    def compared(self, strength: Strength, data: Sequence[Path] = ()) -> SitesCompared:
        """The three numbers: fitted on the site's records and measured on the rows of ``data``, or
        fitted on four fifths of the records and measured on the rest."""
        fitted, tested = (self.rows, self._read(data)) if data else split(self.rows)
        own = None if self.own is None else self.own[None]
        given = (self.model, [fitted], [tested], [self.file.name])
        found = compare_rows(*given, strength, own)
        return replace(found, note=STAYS if data else f"{STAYS} {SEEN}")

    def _read(self, data: Sequence[Path]) -> SiteRows:
        parts = [read_site(self.model, one) for one in data]
        features, labels = ([getattr(p, key) for p in parts] for key in ("features", "labels"))
        return SiteRows(torch.cat(features), torch.cat(labels))

    def personal(self, strength: Strength) -> Model:
        """The site's own model: the one that the run trained, or the common one, fitted further."""
        if self.own is None:
            return personal_model(self.model, self.rows, self.file.name, strength)
        if strength != "auto":
            raise BadInput(
                "not-applicable",
                f"--strength is {strength}, and the run trained this site's model with a strength "
                f"of its own; leave it out",
            )
        model = replace(self.model, privacy=self.stated(self.ledger()))
        return noised_personal(model, self.own, self.file.name)

    def noised(self, epsilon: float, steps: int, step_size: float, strength: Strength) -> Model:
        """The common model, fine-tuned by noised steps, with the composed ε of all that this site's
        ledger holds and of these steps.

        Refuses, and spends nothing, where the policy has too little left. The process of the site
        must not run: one at a time writes the ledger.
        """
        state = StateFolder(self.file.state, self.file.name)
        try:
            ledger = self.ledger()
            said = self.stated(ledger)
            if said is None or said.run is None:
                raise BadInput(
                    "no-privacy",
                    "the run has no guarantee at this site (no privacy, or a rehearsal), so noise "
                    "on top gives none; leave --noised out and keep the model at the site",
                )
            size, declared = self.work.records, self.work.declared
            delta = self.file.policy.run_delta
            given = steps_after(said.run, size, epsilon, declared, steps, step_size, delta)
            self._reserve(ledger, given)
            held = self.work.held
            rows = SiteRows(held.features, held.labels)
            fit = noised_fit(self.model.task, rows, self.model.params, given, strength, held.used)
        finally:
            state.close()
        return composed_personal(
            self.model, fit, self.file.name, with_further(said, [given.release])
        )

    def ledger(self) -> SiteLedger:
        """The site's ledger."""
        try:
            return SiteLedger(self.file.state / "ledger.jsonl", self.file.name)
        except Refused as no:
            raise BadInput("ledger-damaged", f"the ledger cannot be read: {no.detail}") from no

    def stated(self, ledger: SiteLedger) -> Statement | None:
        """What the site guarantees by its own ledger: the grant of this run, and all other grants
        and recoveries added. None where one of them has no guarantee."""
        known = self.memory.enrolment()
        entry = None if known is None else ledger.runs.get(known.run)
        reserved = [one for one in ledger.runs.values() if one.has_grant]
        if entry is None or any(one.grant.epsilon is None for one in reserved):
            return None
        run = _granted(entry)
        said = statement(replace(run, rounds=entry.grant.participations))
        others = [_reserved(one) for one in reserved if one.run != entry.run]
        others += [FurtherRelease("recoveries", one.epsilon, one.delta) for one in ledger.lost]
        return with_further(said, others) if others else said

    def _reserve(self, ledger: SiteLedger, given: NoisedSteps) -> None:
        """The ε of the steps in the ledger, as of a run of one participation, before any step."""
        policy, left = self.file.policy, ledger.left(self.file.policy)
        room = min(left.epsilon, policy.most_of_one_run)
        if policy.secure is not None:
            room = min(room, left.alone)
        if left.runs < 1 or given.delta > left.delta * (1 + 1e-9) or given.spent > room:
            raise BadInput(
                "budget-too-small",
                f"noised steps ask for ε = {round_up(given.spent)} at δ = {given.delta:g}, and the "
                f"policy has {room:.4g} left for one more run ({max(0, left.runs)} runs, δ = "
                f"{left.delta:g}); ask for less, or leave --noised out and keep the model here",
            )
        known = self.memory.enrolment()
        names = fresh_id(), digest("personal", known.run if known else "")
        terms = self.release_terms(FINE_TUNING, given.steps, given.mechanism)
        account = terms.to_dict(given.records, given.records, given.declared)
        granted = SiteGrant(1, given.spent, given.delta)
        ledger.spend_once(GrantedRun(*names, granted, account))

    def release_terms(
        self, algorithm: str, steps: int = 1, mechanism: Gaussian | None = None
    ) -> Terms:
        """The terms of something that is released once after the run, for the ledger."""
        return Terms(
            rounds=1,
            local_steps=steps,
            user_ratio=1.0,
            data_ratio=1.0,
            weighting="uniform",
            algorithm=algorithm,
            task=self.work.terms.task,
            parameters=self.work.task.parameters,
            mechanism=mechanism,
        )


def _granted(entry: GrantedRun) -> Mechanism:
    """A granted run as the accountant sees it, with this site's own noise alone: if all others
    collude, in a run with secure sums."""
    account = entry.account
    mechanism = Gaussian.from_json(account["mechanism"])
    terms = Terms(**account["terms"], mechanism=mechanism, sums=sums_of(entry))
    facts = (account["records"], account["batch"], entry.grant.delta, account["declared"])
    return terms.run_alone(*facts)


def _reserved(entry: GrantedRun) -> FurtherRelease:
    """What another grant of the ledger adds."""
    grant = entry.grant
    noised = entry.account["terms"]["algorithm"] == FINE_TUNING
    name = NAME if noised else "other runs"
    return FurtherRelease(name, grant.epsilon_alone or grant.epsilon or 0.0, grant.delta)


def after_run(path: Path, run: str | None) -> FinishedSite:
    """A site after a finished run, the latest by default."""
    file = read_site_file(path)
    memory, model = finished_run(file.state, run), stored_model(path, run)
    known = memory.enrolment()
    assert known is not None  # the model was read with it
    try:
        made = opener(file, path.resolve().parent, torch.device("cpu"), lambda said: None)
        work = made(known.offer, file.policy)
        slots = memory.acknowledged().slots
    except Refused as no:
        raise BadInput(no.code, f"the run cannot be used: {no}") from no
    used = work.held.used
    rows = SiteRows(work.held.features[used], work.held.labels[used])
    if not len(rows):
        raise BadInput(
            "no-rows", "no record can be read, so no model can be fitted; see site check"
        )
    return FinishedSite(file, memory, work, model, rows, _own(slots, model))


def _own(slots: Vectors, model: Model) -> Tensor | None:
    """The model that the run trained for this site; None where it trained none."""
    if "personal" not in slots:
        return None
    tensors = {name: torch.as_tensor(value)[None] for name, value in slots.items()}
    return given_out(tensors, model.params)[0]
