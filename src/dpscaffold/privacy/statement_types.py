"""The privacy statement of a plan or a run as a typed object, which is also ``privacy.json``.

The classes document the keys of that file. A field that is None by default is left out of the file
where it has no value, unless its description says otherwise. Every ε is for the ``delta`` and the
``neighbours`` that the same statement names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from html import escape
from typing import Any, ClassVar, cast

from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.record import JsonRecord, optional
from dpscaffold.privacy.showing import percent, round_up


@dataclass(frozen=True, eq=False)
class ViewGuarantee(JsonRecord):
    """What is guaranteed towards one adversary, or the reason why nothing is.

    - ``epsilon``: the ε to quote towards this adversary; null where there is no guarantee.
    - ``replace_one``: ε for replacing one record by another; null where none is proved.
    - ``delta``: δ.
    - ``bound``: the name of the bound that gives ε.
    - ``reason``: why there is no ε.
    - ``neighbours``: which datasets count as neighbours.
    - ``theorem``, ``assumptions``, ``reference``: what proves the bound, what it needs, and where
      it was published.
    - ``note``: what to keep in mind with this ε.
    - ``training_alone``: ε without the other mechanisms on the same records; ``composition``: how
      they were added up.
    - ``ledger``: the largest ε that a user spent, given who took part.
    - ``colluders``: how many participants pool what they know (participants' view only).
    """

    epsilon: float | None = None
    replace_one: float | None = optional()
    delta: float | None = optional()
    bound: str | None = None
    reason: str | None = optional()
    neighbours: str | None = optional()
    theorem: str | None = optional()
    assumptions: tuple[str, ...] | None = optional()
    note: str | None = optional()
    reference: str | None = optional()
    training_alone: float | None = optional()
    composition: str | None = optional()
    ledger: float | None = optional()
    colluders: int | None = optional()

    def _is_written(self, one: Field[Any]) -> bool:
        if one.name == "replace_one":
            return self.replace_one is not None or self.neighbours is not None
        if one.name == "reason":
            return self.reason is not None or self.note is not None
        return super()._is_written(one)


def _not_stated() -> ViewGuarantee:
    """A view that a statement of an earlier version does not mention."""
    return ViewGuarantee(reason="this statement does not mention this adversary")


@dataclass(frozen=True, eq=False)
class BoundRow(JsonRecord):
    """One bound on ε: its value, or the ``reason`` why it does not apply.

    ``views`` are the adversaries that it holds against, ``explanation`` says in words why it holds.
    """

    name: str
    title: str
    views: tuple[str, ...]
    epsilon: float | None
    delta: float
    neighbours: str
    applies: bool
    reason: str | None
    theorem: str
    assumptions: tuple[str, ...]
    reference: str
    explanation: str


@dataclass(frozen=True, eq=False)
class EpsilonSpread(JsonRecord):
    """Quantiles of ε over users, given who took part."""

    min: float
    quarter: float
    median: float
    three_quarters: float
    max: float


@dataclass(frozen=True, eq=False, kw_only=True)
class SpentByUsers(JsonRecord):
    """What users spent, given who took part.

    - ``epsilon``: the largest ε of a user, by the ``bound`` named.
    - ``replace_one``: the same for replacing one record by another; null where none is proved.
    - ``participations``: number of participations → number of users.
    - ``epsilon_over_users``: quantiles of ε over users.
    """

    epsilon: float
    bound: str
    replace_one: float | None = None
    participations: Mapping[int, int]
    epsilon_over_users: EpsilonSpread


@dataclass(frozen=True, eq=False)
class EpsilonByUser(JsonRecord):
    """ε of each user where users have noise of their own, over the random draw of participants.

    - ``bound``: the bound towards the server that gives them.
    - ``epsilon``: ε_i of every user, in the users' order; the largest is the ε of the statement.
    - ``noise``: σ_i of every user.
    - ``epsilon_over_users``: quantiles of ε over users.
    """

    bound: str
    epsilon: tuple[float, ...]
    noise: tuple[float, ...]
    epsilon_over_users: EpsilonSpread

    def sentence(self) -> str:
        """How ε differs between users, in words."""
        found = self.epsilon_over_users
        least, middle, most = map(round_up, (found.min, found.median, found.max))
        return (
            f"Users have budgets of their own: epsilon towards the server is from {least} to "
            f"{most} over users, {middle} in the median, and the first number is the largest."
        )


@dataclass(frozen=True, eq=False)
class PlannedEpsilon(JsonRecord):
    """ε towards the server if all planned rounds are run."""

    rounds: int
    epsilon: float | None


@dataclass(frozen=True, eq=False)
class RateRange(JsonRecord):
    """The smallest and the largest number over users: the share of records in a batch, or σ_i."""

    min: float
    max: float


@dataclass(frozen=True, eq=False)
class SecureSummary(JsonRecord):
    """Secure sums: how many ``colluders`` may help the server, how many members the shortest list
    has (``least``), and how many attempts may end without a result (``voids``)."""

    colluders: int
    least: int
    voids: int


@dataclass(frozen=True, eq=False, kw_only=True)
class MechanismSummary(JsonRecord):
    """What the run releases, in words and numbers.

    - ``unit``: ``record`` or ``user``, which is what is protected.
    - ``neighbours``, ``relation``: the neighbouring datasets, in words and by name.
    - ``sampling``, ``rate``: how batches are drawn; the rate is null with users as the unit.
    - ``clip``: the clipping norm C, or ``median``.
    - ``noise``: σ_g; ``noise_scale`` says what it is a multiple of. ``noise_range``: the smallest
      and the largest σ_i, where users have noise of their own.
    - ``rounds``, ``local_steps``, ``users``, ``participants``: planned rounds, steps in a round,
      users, and users in a round.
    - ``memory``: whether users keep a state between rounds.
    - ``weighting``: how users are averaged.
    - ``max_participations``: after that many a user declines; null without a cap.
    - ``may_decline``: when a drawn user may decline; null where none may.
    - ``secure``: secure sums, where the server sees sums only.
    - ``aggregation``: what the server makes of the uploads, where it is not their mean.
    """

    unit: str
    neighbours: str
    relation: str | None = None
    sampling: str
    rate: RateRange | None
    clip: float | str
    noise: float
    noise_scale: str
    noise_range: RateRange | None = optional()
    rounds: int
    local_steps: int
    users: int
    participants: int
    memory: bool
    weighting: str
    max_participations: int | None = None
    may_decline: str | None = None
    secure: SecureSummary | None = optional()
    aggregation: str | None = optional()

    def noises(self) -> str:
        """σ_g, or from the smallest to the largest σ_i."""
        if self.noise_range is None:
            return f"{self.noise:g}"
        return f"{self.noise_range.min:g} to {self.noise_range.max:g} (each user its own)"


@dataclass(frozen=True, eq=False)
class EpsilonAtDelta(JsonRecord):
    """ε at one δ: by view, and under ``ledger`` given who took part."""

    REST: ClassVar[str] = "by_view"

    delta: float
    by_view: Mapping[str, float | None]


@dataclass(frozen=True, eq=False, kw_only=True)
class QuotedEpsilon(JsonRecord):
    """The ε that the sentence to quote begins with.

    ``towards`` is ``server``, ``third_party``, or ``everybody`` where the draw of the participants
    was known, so that only what was spent given who took part counts.
    """

    epsilon: float | None
    replace_one: float | None = None
    bound: str | None
    towards: str


@dataclass(frozen=True, eq=False)
class PreparationStep(JsonRecord):
    """One step of preparing the data: what was done, and how it treats private records
    (:mod:`dpscaffold.privacy.preparation`)."""

    sentence: str
    protection: str


@dataclass(frozen=True, eq=False)
class CostEntry(JsonRecord):
    """Another private mechanism on the same records: a Gaussian with this ``noise`` multiplier, or
    (``epsilon``, ``delta``). Every ε of the statement includes it."""

    name: str
    noise: float | None
    epsilon: float | None
    delta: float


@dataclass(frozen=True, eq=False)
class PartSummary(JsonRecord):
    """One part of a run that was given more rounds later: its rounds, δ, and ε by view."""

    rounds: int
    delta: float | None
    epsilon: Mapping[str, float | None]


@dataclass(frozen=True, eq=False)
class JournalHead(JsonRecord):
    """How many lines the run's journal had when the statement was written, and the hash that
    chains them."""

    lines: int
    head: str


@dataclass(frozen=True, eq=False)
class TruePositives(JsonRecord):
    """The largest true-positive rate of any test at a false-positive rate."""

    false_positives: float
    rate: float


@dataclass(frozen=True, eq=False)
class GroupTerms(JsonRecord):
    """The same for k records that change together; ``epsilon`` is None where none is proved."""

    size: int
    accuracy: float
    true_positives: tuple[TruePositives, ...]
    epsilon: float | None


@dataclass(frozen=True, eq=False)
class HumanTerms(JsonRecord):
    """What one loss distribution means for what it protects, a record or a user.

    - ``accuracy``: at even odds, the best test is right with probability 1/2 + ``advantage``/2.
    - ``true_positives``: the largest true-positive rate at small false-positive rates.
    - ``mu``: approximate Gaussian privacy, the smallest μ over false-positive rates in
      ``mu_range`` = [δ, 1 − δ]; null where none holds.
    - ``groups``: k records of one person (k users, where users are the unit).
    - ``curve``: (α, f(α)), f rounded down.

    In JSON ``mu_approximate`` is true, and ``sentence`` says it in words.
    """

    bound: str
    protects: str
    neighbours: str
    delta: float
    advantage: float
    accuracy: float
    true_positives: tuple[TruePositives, ...]
    mu: float | None
    mu_range: tuple[float, float]
    groups: tuple[GroupTerms, ...]
    curve: tuple[tuple[float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """The JSON object, with the sentence."""
        derived = {"mu_approximate": True, "sentence": self.sentence()}
        return {**super().to_json(), **derived, **self.unknown}

    def sentence(self) -> str:
        """What to tell a person, every figure rounded up."""
        found = " and ".join(
            f"{percent(t.rate)} at a {t.false_positives * 100:g} % false-positive rate"
            for t in self.true_positives
        )
        what = "user's whole dataset" if self.protects == "user" else "record"
        used = "datasets" if self.protects == "user" else "records"
        replaced = "(replace-one)" in self.neighbours
        return (
            f"Even if all but the noise is known, the best test of whether one {what} was used"
            f"{', or another in its place,' if replaced else ''} is right at most "
            f"{percent(self.accuracy)} of the time, where guessing is right 50 %. "
            f"It detects at most {found} of the {used} used."
        )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Statement(JsonRecord):
    """What a plan or a run guarantees: to whom, by which theorem, and what is outside it.

    It is the content of ``privacy.json``. Read it by attribute (``statement.server.epsilon``) or by
    key (``statement["server"]["epsilon"]``); it prints as the sentence to quote.

    - ``simulated``: the seed of the noise is stored, so the noise can be removed. A file that does
      not say it is refused.
    - ``guarantee``: whether any ε is guaranteed; if not, ``reason`` says why.
    - ``delta``: δ of every ε; null without a guarantee. ``delta_note``: a warning about a large δ.
    - ``rounds``: the rounds that are counted.
    - ``mechanism``: what the run releases.
    - ``views``: the adversaries, by name, and what each sees.
    - ``bounds``: every bound, with its ε or why it does not apply.
    - ``server``, ``third_party``, ``participant``: the guarantee towards each adversary.
    - ``alone``: the guarantee of a run with secure sums if all other sites collude with the server.
    - ``by_user``: ε and σ_g of each user, where users have budgets of their own.
    - ``paper_third_party``: the number of the published formula, for comparison only.
    - ``ledger``: what users spent, given who took part; only of a run.
    - ``planned``: ε if all planned rounds are run; only of a run.
    - ``epsilon_by_delta``: ε at smaller δ.
    - ``human``: what ε means for one person, by view, and under ``ledger`` given who took part.
    - ``quoted``: the ε of the sentence; ``person``: what it means for one person, in a sentence.
    - ``quote``: the sentence to quote, with all its conditions.
    - ``extra_costs``: other private mechanisms on the same records, part of every ε.
    - ``preprocessing``, ``preparation``: how the data were prepared, in sentences, and with the
      protection of each step.
    - ``tuning``: which settings were chosen without private records.
    - ``outside``: what no ε covers.
    - ``run``: the description of the run that the accountant counts; null without privacy.
    - ``parts``: the parts of a run that was given more rounds later.
    - ``journal``: the state of the run's journal when the statement was written.
    """

    simulated: bool
    guarantee: bool
    reason: str | None = None
    delta: float | None = None
    delta_note: str | None = None
    rounds: int | None = optional()
    mechanism: MechanismSummary | None = optional()
    views: Mapping[str, str] | None = optional()
    bounds: tuple[BoundRow, ...] = ()
    server: ViewGuarantee = field(default_factory=_not_stated)
    third_party: ViewGuarantee = field(default_factory=_not_stated)
    participant: ViewGuarantee = field(default_factory=_not_stated)
    alone: ViewGuarantee | None = optional()
    by_user: EpsilonByUser | None = optional()
    paper_third_party: ViewGuarantee = field(default_factory=_not_stated)
    ledger: SpentByUsers | None = optional()
    planned: PlannedEpsilon | None = optional()
    epsilon_by_delta: tuple[EpsilonAtDelta, ...] | None = optional()
    human: Mapping[str, HumanTerms] | None = optional()
    quoted: QuotedEpsilon | None = optional()
    person: str | None = optional()
    quote: str = ""
    extra_costs: tuple[CostEntry, ...] | None = optional()
    preprocessing: tuple[str, ...] = ()
    preparation: tuple[PreparationStep, ...] = ()
    tuning: str | None = optional()
    outside: tuple[str, ...] = ()
    run: Mechanism | None = None
    parts: tuple[PartSummary, ...] | None = optional()
    journal: JournalHead | None = optional()

    def towards(self, view: str) -> ViewGuarantee:
        """The guarantee towards an adversary: ``server``, ``third_party`` or ``participant``; with
        secure sums also ``alone``."""
        return cast(ViewGuarantee, getattr(self, view)) or _not_stated()

    @property
    def quotes_ledger(self) -> bool:
        """Whether what was spent given who took part is quoted first, the draw being known."""
        return self.quoted is not None and self.quoted.towards == "everybody"

    @property
    def quoted_epsilon(self) -> float | None:
        """The ε to quote; the server's in statements of earlier versions, which name no other."""
        if self.quotes_ledger and self.parts and self.ledger:
            return self.ledger.epsilon  # earlier versions quoted the first part
        if self.quoted is None or self.parts:
            return self.server.epsilon
        return self.quoted.epsilon

    def __repr__(self) -> str:
        return self.quote or "no statement"

    def _repr_html_(self) -> str:
        views = ("server", "alone", "third_party", "participant")
        names = {"alone": "server and all others"}
        found = ((names.get(v, v.replace("_", " ")), self.towards(v)) for v in views)
        rows: list[tuple[str, str]] = [
            (f"ε towards the {view}", f"{round_up(said.epsilon)} ({said.bound})")
            for view, said in found
            if said.epsilon is not None
        ]
        rows += [] if self.delta is None else [("δ", f"{self.delta:.3g}")]
        rows.append(("to quote", repr(self)))
        rows.append(("outside the guarantee", f"{len(self.outside)} things"))
        left = 'style="text-align:left"'
        lines = "".join(
            f'<tr><th scope="row" {left}>{escape(name)}</th><td {left}>{escape(value)}</td></tr>'
            for name, value in rows
        )
        return f"<table><caption><b>Privacy statement</b></caption><tbody>{lines}</tbody></table>"
