"""The privacy part of a run: what is done to every gradient before it may influence anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from dpscaffold.checks import number
from dpscaffold.config.budgets import louder_of
from dpscaffold.config.secure import Colluding
from dpscaffold.config.table import RunTable
from dpscaffold.data.meanings import PathText
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Adversary, adversaries
from dpscaffold.privacy.mechanism import (
    RECORDS,
    Clip,
    Delta,
    Mechanism,
    Sampling,
    Unit,
    Weighting,
    check_delta,
    check_noise,
    describe,
    noise_scale,
)

if TYPE_CHECKING:
    from dpscaffold.algorithms import Algorithm
    from dpscaffold.config.secure import Secure

View = Literal["server", "third-party", "participant"]

#: Clip bounds that float32 can hold, together with C/‖g‖ and sums of many gradients of length C.
_CLIPS = (1e-20, 1e30)


class Rounds(Protocol):
    """The numbers of a plan that the accountant reads; a site knows no more of it."""

    @property
    def rounds(self) -> int:
        """T."""

    @property
    def local_steps(self) -> int:
        """K."""

    @property
    def weighting(self) -> Weighting:
        """How uploads are weighted in the mean."""


class NoisedStep(RunTable):
    """What is done to the gradients of one step: clip each to C, then add Gaussian noise to the
    batch's mean. Parties agree on this; the limits of what is spent are each party's own.

    A step releases H̃ = (1/b)Σ_j g_j/max(1, ‖g_j‖/C) + (2C/b)·N(0, σ_g²I), the norm being over the
    whole parameter vector. With ``unit="user"`` the noise is 2C·N(0, σ_g²I), which hides a user's
    whole dataset.

    >>> NoisedStep(clip=1.0, noise=60.0).scale(clip=1.0, batch=10)
    12.0
    """

    table: ClassVar[str] = "privacy"

    clip: Clip = 1.0
    """C, the largest gradient norm of a record. 'median' is the paper's heuristic, without a
    guarantee. Value: a number from 1e-20 to 1e30, or 'median'. Example: ``1.5``"""
    noise: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, json_schema_extra={"default": None}
    )
    """σ_g, the noise in units of the sensitivity 2C/b. It is half of what Opacus calls the noise
    multiplier. Value: a number, 0 or more. Example: ``30.0``"""
    sampling: Sampling = "fixed"
    """Batches of a fixed size (ε is for replacing one record), or Poisson batches (ε is for
    removing the content of one record). Example: ``"poisson"``"""
    unit: Unit = "record"
    """What is protected: one record, or all records of one user. Example: ``"user"``"""
    secret: bool = False
    """Whether batches and noise are drawn from the operating system instead of plan.seed. Only this
    gives a real guarantee. In a server's plan the default is true; false is for public data, to
    compare a run with the simulator. Example: ``true``"""

    @model_validator(mode="after")
    def _clips(self) -> Self:
        check_noise("privacy.noise", self.noise)
        if self.clip == "median":
            return self
        clip = float(self.clip)
        if not clip > 0:
            raise BadInput(
                "out-of-range", f"privacy.clip is {self.clip!r}; give a positive number or 'median'"
            )
        if not (_CLIPS[0] <= clip <= _CLIPS[1] or math.isinf(clip)):
            raise BadInput(
                "clip-not-exact",
                f"privacy.clip is {self.clip}, to which float32 gradients cannot be clipped "
                f"exactly; give a number from {_CLIPS[0]:g} to {_CLIPS[1]:g}",
            )
        if math.isinf(clip) and self.noise > 0:
            raise BadInput(
                "clip-infinite",
                f"privacy.clip is infinite while privacy.noise is {self.noise}; noise needs a "
                f"finite clip",
            )
        return self

    def scale(self, clip: Any, batch: Any) -> Any:
        """The standard deviation of the noise on the mean of a batch."""
        return noise_scale(self.noise, self.unit, clip, batch)

    def run(
        self,
        algorithm: Algorithm | None,
        plan: Rounds,
        sizes: Sequence[int],
        cohort_size: int,
        batch_sizes: Sequence[int],
        *,
        declared: bool,
        delta: Delta | None,
        declines: str | None = None,
        secure: Secure | None = None,
        weights: Sequence[float] | None = None,
        noises: Sequence[float] | None = None,
    ) -> Mechanism:
        """A run of such steps, as data for the accountant: every run is described here.

        Args:
            algorithm: None where it is not known, which counts as the worse (users have a memory).
            plan: All rounds that are planned.
            sizes: R_i of every user.
            cohort_size: m.
            batch_sizes: b_i of every user.
            declared: Whether R_i are constants that were declared without looking at the data.
            delta: δ, or None for the default.
            declines: Why a drawn user may stay away.
            secure: Secure sums, where the server sees sums only.
            weights: The users' public weights in the mean, with ``weighting="noise"``.
            noises: σ_i of every user, where users differ.
        """
        return describe(
            rounds=plan.rounds,
            local_steps=plan.local_steps,
            weighting=plan.weighting,
            users=len(sizes),
            cohort_size=cohort_size,
            records=sizes,
            batch_sizes=batch_sizes,
            memory=algorithm is None or algorithm.memory,
            one_sum=algorithm is not None and algorithm.one_sum,
            unproved_hooks=() if algorithm is None else algorithm.unproved,
            query="gradients" if algorithm is None or algorithm.sums is None else "sums",
            noise=self.noise,
            clip=self.clip,
            sampling=self.sampling,
            unit=self.unit,
            delta=delta,
            declines=declines,
            declared_sizes=declared and self.sampling == "poisson",
            secure=None if secure is None else secure.terms(cohort_size),
            extra=0 if secure is None else secure.voids,
            louder=None if noises is None else louder_of(noises),
            weights=weights,
        )

    @property
    def step(self) -> NoisedStep:
        """This without the limits of what is spent."""
        given = self.model_dump(include=set(NoisedStep.model_fields))
        return NoisedStep(**{**given, "noise": self.noise})


#: Noise of all users, or of each.
NOISES = {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}

#: What a release overlooks where it is told to, by name.
Exceptions = Annotated[
    tuple[Literal["unprotected-preprocessing", "median-clip"], ...], Field(min_length=1)
]


def overruled(release: object) -> tuple[str, ...] | None:
    """The exceptions from the rules of a release; None where nothing is released.

    >>> overruled(True), overruled(["median-clip"]), overruled(False)
    ((), ('median-clip',), None)
    """
    if isinstance(release, list | tuple):
        return tuple(release)
    return () if release is True else None


class Gaussian(Colluding, NoisedStep):
    """``[privacy]``: noised steps, and the limits of what a run may spend.

    Give ``noise``, or ``epsilon`` with the ``view`` it is promised to, from which the noise is
    solved. ``release`` is the recipe for a model to publish (:mod:`dpscaffold.config.release`),
    with the exceptions from its rules.

    >>> Gaussian(epsilon=1.0, delta=1e-5).view
    'server'
    """

    noise: Annotated[float, WithJsonSchema(NOISES)] = Field(
        default=1.0, ge=0, allow_inf_nan=False, json_schema_extra={"default": None}
    )
    """σ_g, the noise in units of the sensitivity 2C/b, or a list with σ_i of each user, in the
    users' order; 'train' writes the list that it solved for from a table of budgets. It is half of
    what Opacus calls the noise multiplier. Value: a number, 0 or more, or a list of numbers above
    0. Example: ``30.0``"""
    _noises: tuple[float, ...] | None = PrivateAttr(default=None)
    epsilon: float | dict[str, float] | None = None
    """The ε to spend, instead of noise: the noise is solved from it. A table gives users budgets of
    their own, by name; the key 'default' is for all that it does not name. Value: a number above 0,
    or a table of them. Example: ``1.0``"""
    view: View = "server"
    """The adversary that epsilon is promised to. Example: ``"third-party"``"""
    colluders: int = Field(default=1, ge=1)
    """The number of participants that pool what they know (view 'participant'). Value: an
    integer, 1 or more. Example: ``2``"""
    delta: Delta | None = None
    """δ; by default 0.1 divided by the number of training records, or by the number of users with
    unit 'user'. Value: a number above 0 and below 1, or '1/records'. Example: ``1e-05``"""
    user_epsilon: float | None = Field(default=None, gt=0)
    """A user declines before its own ε, given who took part, would exceed this value. It holds over
    all rounds, later extensions included. Value: a number above 0. Example: ``2.0``"""
    budget_file: PathText | None = None
    """A budget that several runs over the same records share (dpscaffold privacy FILE).
    Example: ``"budget.jsonl"``"""
    release: bool | Exceptions | None = None
    """Whether the model is meant for release: secret noise, participants that nobody chose, and
    nothing left unprotected. A list names the exceptions from these rules. Example: ``true``"""

    @model_validator(mode="before")
    @classmethod
    def _released(cls, given: Any) -> Any:
        """Noise and batches of a release are secret."""
        if isinstance(given, Mapping) and overruled(given.get("release")) is not None:
            return {**given, "secret": True}
        return given

    @model_validator(mode="wrap")
    @classmethod
    def _of_each_user(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Of a list of noises, the smallest is σ_g."""
        listed = given.get("noise") if isinstance(given, Mapping) else None
        if not isinstance(listed, list | tuple):
            return validate(given)
        if not listed:
            raise BadInput(
                "not-a-list", "privacy.noise is an empty list; give a number, or one for each user"
            )
        for place, noise in enumerate(listed):
            name = f"privacy.noise[{place}]"
            if not number(name, noise) > 0:
                raise BadInput("noise-out-of-range", f"{name} is {noise!r}; give a number above 0")
            check_noise(name, noise)
        made = validate({**given, "noise": min(listed)})
        made._noises = tuple(map(float, listed))
        return made

    @model_validator(mode="after")
    def _agreeing(self) -> Self:
        self._check_one()
        given = self.epsilon if isinstance(self.epsilon, dict) else {"": self.epsilon}
        for user, epsilon in given.items():
            if epsilon is not None and not epsilon > 0:
                name = f"privacy.epsilon.{user}".rstrip(".")
                raise BadInput(
                    "out-of-range",
                    f"{name} is {epsilon:g}; give a number above 0, such as 2 (smaller is "
                    f"stronger)",
                )
        if self.delta is not None and self.delta != RECORDS:
            check_delta("privacy.delta", self.delta)
        if self.budget_file == "":
            raise BadInput(
                "wrong-type", "privacy.budget_file is empty; give the path of a budget file"
            )
        return self

    def _check_one(self) -> None:
        """Either noise or epsilon."""
        given = "noise" in self.model_fields_set
        if given != (self.epsilon is None):
            said = "both are given" if given else "neither is given"
            remedy = "set privacy.noise or privacy.epsilon"
            if given:
                remedy = "leave one out (--set privacy.noise=, or --set privacy.epsilon=)"
            raise BadInput(
                "noise-or-epsilon", f"privacy needs either noise or epsilon, and {said}; {remedy}"
            )

    @model_serializer(mode="wrap")
    def _solved(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Noise that is still to be solved for is not written."""
        values: dict[str, Any] = plain(self)
        if self._noises is not None and "noise" in values:
            values["noise"] = list(self._noises)
        if self.epsilon is not None:
            values.pop("noise", None)
        return values

    @property
    def noise_by_user(self) -> tuple[float, ...] | None:
        """σ_i of each user; None where all have the same."""
        return self._noises

    @property
    def allowed(self) -> tuple[str, ...] | None:
        """What a release overlooks; None where nothing is released."""
        return overruled(self.release)

    def noise_of(self, user: int) -> float:
        """σ_i."""
        return self.noise if self.noise_by_user is None else self.noise_by_user[user]

    def with_noise(self, noise: float) -> Gaussian:
        """These limits with a noise that was checked, for all users."""
        copy = self.model_copy(update={"noise": noise})
        copy._noises = None
        return copy

    def with_step(self, step: NoisedStep, noises: tuple[float, ...] | None = None) -> Gaussian:
        """These limits, on what the parties agreed to do in a step."""
        own = {"noise": noises or step.noise, "epsilon": None, "release": None}
        return self.changed(**{**step.model_dump(), **own})

    def against(self, run: Mechanism) -> Adversary:
        """The adversary that ``epsilon`` is promised to."""
        return adversaries(run, self.colluders)[self.view.replace("-", "_")]
