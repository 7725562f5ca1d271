"""What an offer asks for, on this site's records: the simulator's own functions, for one user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpscaffold.algorithms import Algorithm, Broadcast, Participant
from dpscaffold.config import Run
from dpscaffold.config.budgets import heterogeneity_of, noise_weight
from dpscaffold.config.gaussian import NoisedStep
from dpscaffold.config.plan import Plan
from dpscaffold.deployment.protocol.agreement import Offer, names_in, read_offer
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.protocol.messages import Refused, Vectors
from dpscaffold.deployment.protocol.shapes import broadcast_lengths, slot_lengths
from dpscaffold.deployment.protocol.sums import Members
from dpscaffold.deployment.server.agreed import setting_of, trial_of
from dpscaffold.deployment.site.file import Policy, SiteFile, SumTerms, Terms
from dpscaffold.deployment.site.reading import SiteRecords, read_records
from dpscaffold.engine.aggregate import Summed
from dpscaffold.engine.host import Source, drawn_on_host
from dpscaffold.engine.query import Numbers, query_of, query_of_step
from dpscaffold.engine.records import Records
from dpscaffold.engine.steps import Drawn, Participation, local_steps
from dpscaffold.errors import BadInput
from dpscaffold.privacy import adversaries, noise_seen
from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks import Task


@dataclass(frozen=True)
class OfferedWork:
    """An accepted offer's computation. All vectors are float32 arrays (P,) or (1,)."""

    offer: Offer
    task: Task
    algorithm: Algorithm
    held: SiteRecords
    records: int
    declared: bool
    device: torch.device
    #: This site's name, by which an offer gives it noise of its own.
    name: str = ""

    @cached_property
    def final_parameters(self) -> int:
        """The number of parameters of the model that arrives at the end."""
        return self.offer.build_task().parameters

    @property
    def public_records(self) -> int | None:
        """R_i as the server may know it: not at all where a user's whole data are protected."""
        return None if hides_sizes(self.offer) else self.records

    @cached_property
    def plan(self) -> Plan:
        """The agreed plan."""
        return self.offer.plan

    @cached_property
    def mechanism(self) -> NoisedStep | None:
        """The noised query, with this site's own noise."""
        return self.offer.mechanism_of(self.name)

    @cached_property
    def batch(self) -> int:
        """b_i = ⌊sR_i⌋."""
        return int(self.plan.batch_sizes(torch.tensor([self.records]))[0])

    @cached_property
    def terms(self) -> Terms:
        """The public numbers."""
        return terms_of(self)

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums of uploads."""
        return self.offer.secure is not None

    def sum_terms(self, name: str, members: Members, least: int) -> SumTerms:
        """The numbers of the run's secure sums for the site ``name``."""
        if self.plan.local_steps != 1:
            raise Refused("policy-steps", f"local_steps {self.plan.local_steps} in a secure sum")
        if self.algorithm.memory:
            raise Refused("policy-algorithm", f"{self.algorithm.name} has a memory")
        try:
            return sum_terms(self, name, members, least)
        except BadInput as error:
            raise Refused("policy-secure", str(error)) from error

    def integers(
        self, round: int, name: str, received: Vectors, members: Members, count: int
    ) -> np.ndarray:
        """One participation in a secure sum of ``count`` members."""
        setting = self._sum_setting(members)
        user, query = members.names.index(name), query_of(setting)
        mechanism = setting.privacy_of(user, count)
        numbers, drawn = self._numbers(round, user, mechanism), self._drawn(round, user, mechanism)
        broadcast = Broadcast(round, self._stack(received["params"]), {})
        at = Participant(broadcast, {}, query.known(numbers))
        part = Participation(self.task, self.algorithm, query, at, numbers)
        upload, _ = Summed([setting]).participate(part, drawn, {0: [user]})
        assert setting.sums is not None
        return setting.sums.grid.words(upload.params[0])

    def _sum_setting(self, members: Members) -> Run:
        """Made once: a run's members never change."""
        if "_made" not in self.__dict__:
            self.__dict__["_made"] = sum_setting(self.offer, members, self.declared)
        made: Run = self.__dict__["_made"]
        return made

    @property
    def warm_rounds(self) -> int:
        """Rounds that only set control variates."""
        return self.plan.warm_rounds or 0 if self.algorithm.warm_up is not None else 0

    def cohort(self, round: int, users: int, seed: int | None) -> tuple[int, ...]:
        """Who is drawn, exactly as the server draws."""
        if users not in self._cohort_sizes:
            self._cohort_sizes[users] = self.plan.cohort_size(users)
        streams = Randomness(self.plan.public_seed if seed is None else seed)
        return tuple(streams.cohort(round, users, self._cohort_sizes[users]).tolist())

    @cached_property
    def _cohort_sizes(self) -> dict[int, int]:
        """m by the number of users, which is one for all rounds of a run."""
        return {}

    def expects(self, round: int) -> Mapping[str, int]:
        """The vectors of a round's task."""
        return broadcast_lengths(self._phase(round), self.task.parameters)

    def remembers(self) -> Mapping[str, int]:
        """The site's slots."""
        return slot_lengths(self.algorithm.remembers, self.task.parameters)

    def shares(self) -> Mapping[str, int]:
        """Those of the site's slots that the server may know."""
        return self._shared

    @cached_property
    def _shared(self) -> Mapping[str, int]:
        return slot_lengths(self.algorithm.shared, self.task.parameters)

    def _phase(self, round: int) -> Algorithm:
        warm = self.warm_rounds
        return self.algorithm.phase(round, warm) if warm else self.algorithm

    @cached_property
    def _records(self) -> Records:
        used = self.held.used
        weight = None if bool(used.all()) else used.to(self.device, torch.float32)
        made = Records.of(self.task, self.held.features, self.held.labels, self.device)
        return replace(made, weight=weight)

    def participate(
        self, round: int, user: int, received: Vectors, slots: Vectors
    ) -> tuple[Vectors, Vectors]:
        """K local steps; in a secret run every call takes new keys from the operating system."""
        shared = {k.removeprefix("shared."): v for k, v in received.items() if k != "params"}
        broadcast = Broadcast(round, self._stack(received["params"]), self._stacks(shared))
        phase, query = self._phase(round), query_of_step(self.mechanism)
        numbers = self._numbers(round, user, self.mechanism)
        at = Participant(broadcast, self._stacks(slots), query.known(numbers))
        drawn = self._drawn(round, user, self.mechanism)
        part = Participation(self.task, phase, query, at, numbers)
        upload, kept = phase.finish(local_steps(part, drawn), at)
        phase.check_upload(upload)
        uploaded = {"params": _row(upload.params)}
        for name, value in upload.totals.items():
            # Where the server mirrors memories it needs them to the last bit, and c_i + Δc_i is
            # not c_i⁺ in floats; so the new slot goes up, and the server takes the difference.
            if phase.mirrored and name in kept:
                uploaded[f"kept.{name}"] = _row(kept[name])
            else:
                uploaded[f"totals.{name}"] = _row(value)
        return uploaded, {name: _row(value) for name, value in kept.items()}

    @cached_property
    def _streams(self) -> dict[bool, Randomness]:
        """The streams of this site's batches and noise, without and with secret noise."""
        return {secret: Randomness(self.plan.public_seed, secret) for secret in (False, True)}

    def _drawn(self, round: int, user: int, mechanism: NoisedStep | None) -> Drawn:
        """The batches of one participation, and its noise."""
        noisy = mechanism is not None and mechanism.noise > 0
        streams = self._streams[mechanism is not None and mechanism.secret]
        declared = self.records if self.declared else None
        source = Source(streams, user, len(self.held), self.batch, declared)
        sampling = mechanism.sampling if mechanism is not None else "fixed"
        size = self.task.parameters if noisy else None
        law = (self.plan.local_steps, sampling, size, self.device)
        starts = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return self._records.batches(starts, drawn_on_host(round, [source], *law))

    def _numbers(self, round: int, user: int, mechanism: NoisedStep | None) -> Numbers:
        """The public numbers of one participation."""
        weight = self._weight(user, mechanism)
        given = (user, self.batch, weight, mechanism, self.device)
        return Numbers.of_one(self.plan, round, *given)

    def _weight(self, user: int, mechanism: NoisedStep | None) -> float:
        """The site's weight in means; a declared size where there is one, not the true one: the
        weight may go up with the upload. A secure sum has its own."""
        if self.plan.weighting == "records":
            return float(self.records if self.declared else len(self.held))
        if self.plan.weighting != "noise" or self.secure:
            return 1.0
        if mechanism is None or mechanism.noise == 0:
            return 1.0
        heterogeneity = heterogeneity_of(mechanism.clip)
        spread = float(mechanism.scale(mechanism.clip, self.batch))
        return noise_weight(spread**2 / self.plan.steps_of(user), heterogeneity)

    def _stack(self, vector: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(vector, np.float32))[None].to(self.device)

    def _stacks(self, vectors: Vectors) -> dict[str, torch.Tensor]:
        return {name: self._stack(vector) for name, vector in vectors.items()}


def _row(stack: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(stack[0].cpu().numpy(), "<f4")


def terms_of(work: OfferedWork) -> Terms:
    """An offer's numbers, as a policy looks at them."""
    offer, plan = work.offer, work.offer.plan
    return Terms(
        rounds=plan.rounds,
        local_steps=plan.local_steps,
        user_ratio=plan.user_ratio,
        data_ratio=plan.data_ratio,
        weighting=plan.weighting,
        algorithm=offer.algorithm.name,
        task=offer.task.module or offer.task.kind,
        parameters=work.task.parameters,
        mechanism=work.mechanism,
        unproved=tuple(work.algorithm.unproved),
        query="gradients" if work.algorithm.sums is None else "sums",
        preparation=offer.fit is not None,
    )


def sum_setting(offer: Offer, members: Members, declared: bool) -> Run:
    """A run with secure sums on its roster, as the server and every member describe it."""
    enrolled = EnrolledRun("", {}, members.names, "", members.sizes, declared=declared)
    return setting_of(offer, enrolled)


def sum_terms(work: OfferedWork, name: str, members: Members, least: int) -> SumTerms:
    """The numbers of a run's secure sums for one member that accepts no list shorter than
    ``least``."""
    setting = sum_setting(work.offer, members, work.declared)
    return terms_of_sums(setting, members.names.index(name), least)


def terms_of_sums(setting: Run, user: int, least: int) -> SumTerms:
    """The same for the user of this number in a setting."""
    sums, run = setting.sums, setting.mechanism
    if sums is None or run is None or run.secure is None:
        raise BadInput("no-noise", "secure sums need privacy.noise")
    shortest = min(max(least, sums.least), sums.participants)
    run = replace(run, secure=replace(run.secure, least=shortest))
    seen = noise_seen(run, adversaries(run)["server"])
    return SumTerms(
        sums.secure.colluders,
        shortest,
        sums.secure.voids,
        sums.participants,
        float(seen.multipliers[run.place(user)]),
    )


def opener(
    file: SiteFile, folder: Path, device: torch.device, log: Callable[[str], None]
) -> Callable[[Mapping[str, Any], Policy], OfferedWork]:
    """What turns an offer into work on the data of ``site.toml``."""

    def open_work(raw: Mapping[str, Any], policy: Policy) -> OfferedWork:
        offer = accepted_names(raw, policy)
        task = build_task(offer, policy)
        held = noted_size(read_records(file.data, folder, offer.rows), file, offer)
        for sentence, _ in held.notes:
            log(sentence)
        held = held.padded(least_records(offer, file))
        size, declared = public_size(file, offer, held)
        given = (held, size, declared, device, file.name)
        work = OfferedWork(offer, task, offer.build_algorithm(), *given)
        try:
            _ = work.mechanism
        except BadInput as error:
            raise Refused("bad-offer", str(error)) from error
        try:
            _ = work.batch, work.plan.cohort_size(1_000_000)
        except BadInput as error:
            raise Refused("data-unfit", str(error)) from error
        return work

    return open_work


def accepted_names(raw: Mapping[str, Any], policy: Policy) -> Offer:
    """The offer, once the policy allows the code that it names; only then is any imported."""
    names = names_in(raw)
    if names.algorithm not in policy.algorithms:
        raise Refused("policy-algorithm", f"{names.algorithm!r:.80}")
    if names.task not in policy.tasks:
        raise Refused("policy-model", f"{names.task!r:.80}")
    offer = read_offer(raw)
    if offer.rows.unfitted is not None:
        raise Refused("preparation", "a step is not fitted yet")
    return offer


def build_task(offer: Offer, policy: Policy) -> Task:
    """The task in the schema's shape, not larger than the policy allows."""
    widest = max(offer.rows.width, offer.rows.dimension, offer.rows.class_count, offer.task.hidden)
    if offer.task.kind != "module" and widest > policy.max_parameters:
        raise Refused("policy-model", f"{widest} is more than {policy.max_parameters} parameters")
    try:
        return summed_task(offer) if offer.build_algorithm().sums else offer.build_task()
    except BadInput as error:
        raise Refused("bad-offer", str(error)) from error


def summed_task(offer: Offer) -> Task:
    """The bounded sums of an offer. Refuses a plan that is not one round over all records: their
    bound, and with it the noise, is made for that."""
    return trial_of(offer.model_copy(update={"secure": None}), (1,)).task


def hides_sizes(offer: Offer) -> bool:
    """Whether nobody may learn R_i, as a user's whole data are protected."""
    return offer.privacy is not None and offer.privacy.unit == "user"


def least_records(offer: Offer, file: SiteFile) -> int:
    """How many records there are at least, those that contribute nothing included.

    Where the number of records is hidden, even an empty table must answer like any other: with a
    user as unit, batches have at least one record. With a declared size, any number may be there if
    neighbours add or remove a record; otherwise empty records fill the table up to that size, so
    that a record that is absent is one that was replaced by an empty one.
    """
    if hides_sizes(offer):
        return math.ceil(1 / offer.plan.data_ratio)
    if file.records is None:
        return 0
    return 1 if adds_or_removes(file, offer) else file.records


def adds_or_removes(file: SiteFile, offer: Offer) -> bool:
    """Whether neighbours add or remove a record, for which the site must declare its size."""
    privacy = offer.privacy
    if file.records is None or privacy is None or hides_sizes(offer):
        return False
    return privacy.sampling == "poisson"


def noted_size(held: SiteRecords, file: SiteFile, offer: Offer) -> SiteRecords:
    """The records, with a note where there are more of them than were declared. All are used: if
    only some were, one record more or less would replace another, which declared sizes do not
    hide."""
    declared = None if hides_sizes(offer) else file.records
    if declared is None or len(held) <= declared:
        return held
    note = (
        f"there are {len(held)} records, and site.toml declares records = {declared}; all of them "
        f"are used, but rates and batches are those of {declared}: declare at least as many"
    )
    return replace(held, notes=(*held.notes, (note, False)))


def public_size(file: SiteFile, offer: Offer, held: SiteRecords) -> tuple[int, bool]:
    """R_i, and whether neighbours add or remove a record, for which R_i must be declared in
    ``site.toml``. A declared size is the one that counts, whatever the offer says: the true number
    stays here."""
    if adds_or_removes(file, offer):
        return file.records or 1, True
    if file.records is not None and not hides_sizes(offer):
        return file.records, False
    return len(held), False
