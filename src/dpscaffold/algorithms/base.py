"""The central type: an algorithm is a handful of small pure functions on flat vectors.

Everything here works alike on one user's vectors of length P (as the loop engine calls it) and on a
stack of users, (U, P) (as the simulator does). PyTorch is imported for its types alone, so that the
registry of algorithms can be read by commands that start without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

#: Named vectors (P,) or numbers (1,); in a stack of users (U, P) or (U, 1).
Slots = Mapping[str, "Tensor"]

#: What a slot holds: a vector like x, or one number.
Size = Literal["vector", "number"]


@dataclass(frozen=True)
class Broadcast:
    """Server → user at the start of a round: x^{t−1} and whatever the algorithm announces.

    ``round`` counts from 1. It is an ``int``, or a tensor of one number, as a round that a GPU has
    recorded is replayed with other numbers: calculate with it, and let no ``if`` ask for it.
    """

    round: Any
    params: Tensor
    shared: Slots = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """Public numbers of a participation, and nothing else.

    In a stack of users all but K are (U, 1), and K too where users take different numbers of steps.

    Args:
        steps: K, the number of local steps.
        step_size: η_l.
        spread: The standard deviation of the noise on one step's gradient, 2Cσ_g/b_i; None where C
            is computed from the batch.
        weight: The user's weight in means, up to a common factor: 1, R_i, or by its noise.
    """

    steps: int | Tensor
    step_size: float | Tensor
    spread: float | Tensor | None = 0.0
    weight: float | Tensor = 1.0

    @property
    def variance(self) -> float | Tensor:
        """``spread²``, for algorithms that are ``noise_aware``: they never meet an unknown one."""
        return 0.0 if self.spread is None else self.spread**2


@dataclass(frozen=True)
class Participant:
    """What a user has when it takes part: the server's message, its own slots, and public
    numbers."""

    broadcast: Broadcast
    memory: Slots
    known: Known


@dataclass(frozen=True)
class Cohort:
    """What ``announce`` may use of a round's participants: nothing that is private.

    Args:
        users: The participants' numbers, (m,).
        weights: Their weights in the mean of Δy, (m,).
        known: Public numbers of their participation.
        memories: Their slots, (m, P) or (m, 1), if the algorithm is ``mirrored``; private slots
            are never among them.
        seen: Who took part before, (m,).
    """

    users: Tensor
    weights: Tensor
    known: Known
    memories: Slots
    seen: Tensor


@dataclass(frozen=True)
class Local:
    """The result of K local steps: the last y_i^K, and the mean of the K noised and regularised
    gradients H + λy."""

    params: Tensor
    mean_gradient: Tensor


@dataclass(frozen=True)
class Upload:
    """User → server at the end of a round.

    ``params`` (Δy_i) is averaged over the participants; ``totals`` (SCAFFOLD's Δc_i) are summed and
    divided by M, the number of all users.
    """

    params: Tensor
    totals: Slots = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """The server's state: x^t and what else it keeps (SCAFFOLD's c, a velocity)."""

    params: Tensor
    slots: Slots = field(default_factory=dict)


Announce = Callable[[Server, Cohort], Slots]
Direction = Callable[["Tensor", "Tensor", Participant], "Tensor"]
Finish = Callable[[Local, Participant], tuple[Upload, Slots]]
Update = Callable[[Server, Upload, float], Server]


def at_x(at: Participant) -> Tensor:
    """Local steps begin at the model that was sent."""
    return at.broadcast.params


def tell_nothing(server: Server, cohort: Cohort) -> Slots:
    """Participants are sent x alone."""
    return {}


@dataclass(frozen=True)
class Partial:
    """A function with its first arguments, as a value: equal ones compare equal, and a run that is
    resumed knows the arguments.

    >>> Partial(pow, (2,)) == Partial(pow, (2,)), Partial(pow, (2,))(10)
    (True, 1024)
    """

    function: Callable[..., Any]
    first: tuple[Any, ...]

    def __call__(self, *rest: Any) -> Any:
        """What the function gives for all arguments."""
        return self.function(*self.first, *rest)


@dataclass(frozen=True)
class Affine:
    """g + ``shift`` + ``pull``·(y − x), or zero where it ``moves`` not. The pull may differ between
    users, (U, 1)."""

    shift: Tensor | None = None
    pull: float | Tensor = 0.0
    moves: bool = True


@dataclass(frozen=True)
class AffineDirection:
    """A direction that is the gradient plus what stands still during a participation, so that a
    device may take all K steps in a program of its own.

    The direction is computed from its ``form``, so the two cannot disagree: an algorithm whose
    direction is replaced has no form, or that of its new direction.

    >>> AffineDirection(lambda at: Affine(shift=5.0))(1.0, None, None)
    6.0
    """

    form: Callable[[Participant], Affine]

    def __call__(self, gradient: Tensor, y: Tensor, at: Participant) -> Tensor:
        """The direction of one step."""
        form = self.form(at)
        if not form.moves:
            return y.new_zeros(y.shape)
        if form.shift is not None:
            gradient = gradient + form.shift
        if isinstance(form.pull, float) and form.pull == 0:
            return gradient
        return gradient + form.pull * (y - at.broadcast.params)


#: Functions, and classes of functions, that are proved to be linear; see :func:`proved_linear`.
_LINEAR: list[object] = []

Proved = TypeVar("Proved", bound=Callable[..., object])


def proved_linear(function: Proved) -> Proved:
    """Mark a ``direction``, the form of one, or a ``finish`` that Theorem 2 of docs/privacy.md
    covers.

    With one local step its result must be the noised gradient times a public factor, the same for
    all users, plus public vectors; a ``finish`` must upload ``params`` alone. Only then does the
    noise of all participants add up in the mean of the uploads, and hide each one from third
    parties. The mark belongs to this very function: neither a wrapper nor a subclass inherits it.
    """
    _LINEAR.append(function)
    return function


def _is_linear(function: object) -> bool:
    part = function.form if type(function) is AffineDirection else function
    return any(proved is part or proved is type(part) for proved in _LINEAR)


#: The fields of an algorithm with which the privacy bounds were proved.
PROVED_FIELDS = frozenset(
    (
        *("name", "direction", "finish", "update", "announce", "remembers", "keeps", "numbers"),
        *("title", "mirrored", "noise_aware", "warm_up", "private", "sums", "begin_at"),
    )
)


#: The fields that a program for local steps takes into account. Any other field is a hook that it
#: would ignore, so an algorithm that sets it takes plain steps.
FAST_FIELDS = PROVED_FIELDS - {"sums", "begin_at"}

#: What preparation is fitted on: the mean, the mean and the squares, or all products.
MomentKind = Literal["mean", "moments", "gram"]


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm as pure functions, with the state that they carry.

    The functions are plain functions, a :class:`Partial` of one, or frozen dataclasses with
    ``__call__``, never closures, so that equal algorithms compare equal. A variant is the base with
    one function replaced.

    Args:
        name: The name that configurations and run folders use.
        direction: ``direction(gradient, y, participant)``, the direction of a local step, given the
            *noised* gradient H + λy at y. What is added here is outside clipping and noise.
        finish: ``finish(local, participant)``, the upload and the user's new slots after K steps.
        update: ``update(server, mean, rate)``, the server's move, given the mean upload: of Δy_i
            over the participants, and of the totals over all M users.
        announce: ``announce(server, cohort)``, what the participants of a round receive in addition
            to x.
        remembers: The slots of every user, ``"vector"`` or ``"number"``; zero at the start.
        keeps: The slots of the server, likewise.
        numbers: The algorithm's own numbers (μ, β): they are configured, stored and compared.
        title: The name in figures and tables; by default ``name``.
        mirrored: Whether ``announce`` needs the cohort's memories.
        noise_aware: Whether the spread of the noise must be known, so that C cannot be computed
            from the batch.
        warm_up: The algorithm of the warm-start rounds.
        private: Slots that never leave their user: they are not uploaded, ``announce`` does not see
            them, and a server cannot restore them.
        begin_at: ``begin_at(participant)``, where local steps begin; by default at x.
        sums: Set for a model of one round of bounded sums in place of gradients
            (:mod:`~dpscaffold.algorithms.sums`). ``sums(task, schema, relation, bound, noise)`` is
            the task whose parameters are the sums, for a model of ``task`` on rows of ``schema``;
            ``relation`` are the neighbours, ``bound`` is the largest norm of a row and ``noise``
            the deviation of what the users add to a mean over all records.

    >>> import torch
    >>> from dpscaffold import fedavg
    >>> def signs(gradient, y, participant):
    ...     return gradient.sign()
    >>> signed = fedavg().replace(name="signed", direction=signs)
    >>> signed.direction(torch.tensor([-3.0, 2.0]), None, None).tolist()
    [-1.0, 1.0]
    """

    name: str
    direction: Direction
    finish: Finish
    update: Update
    announce: Announce = tell_nothing
    remembers: Mapping[str, Size] = field(default_factory=dict, hash=False)
    keeps: Mapping[str, Size] = field(default_factory=dict, hash=False)
    numbers: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    title: str = ""
    mirrored: bool = False
    noise_aware: bool = False
    warm_up: Algorithm | None = None
    private: tuple[str, ...] = ()
    sums: Callable[..., Any] | None = None
    begin_at: Callable[[Participant], Tensor] = at_x

    def __post_init__(self) -> None:
        private, first = set(self.private), self.warm_up or self
        if private - set(self.remembers) or private != set(first.private):
            raise BadInput(
                "bad-algorithm",
                f"algorithm.private is {self.private} for {self.name!r}, and {first.private} in "
                f"its warm-up; give names of remembers ({', '.join(self.remembers) or 'none'}), "
                f"the same in both",
            )

    def replace(self, **changes: object) -> Algorithm:
        """This algorithm with some parts replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def shown(self) -> str:
        """The title, or the name where there is none."""
        return self.title or self.name

    @property
    def memory(self) -> bool:
        """Whether a round depends on what a user did in earlier ones, as the accountant asks."""
        first = self.warm_up is not None and self.warm_up.memory
        return bool(self.remembers) or self.mirrored or first

    @property
    def one_sum(self) -> bool:
        """Whether every upload is proved to be one vector that is linear in the noised gradient."""
        linear = _is_linear(self.direction) and _is_linear(self.finish) and not self.unproved
        return linear and (self.warm_up is None or self.warm_up.one_sum)

    @property
    def shared(self) -> Mapping[str, Size]:
        """The slots of a user that the server may know: all but the private ones."""
        return {name: size for name, size in self.remembers.items() if name not in self.private}

    @property
    def unproved(self) -> tuple[str, ...]:
        """The fields in use with which no privacy bound was proved."""
        return self.in_use_beyond(PROVED_FIELDS)

    def form(self, at: Participant, known: Collection[str] = FAST_FIELDS) -> Affine | None:
        """The form of the direction for one participation, or None where it has none, or fields are
        in use that the caller does not know.

        A subclass of :class:`AffineDirection` may move otherwise, so only the class itself is
        believed.

        >>> from dpscaffold import fedavg
        >>> signs = fedavg().replace(direction=lambda gradient, y, at: gradient.sign())
        >>> signs.form(None) is None
        True
        """
        if type(self.direction) is not AffineDirection or self.in_use_beyond(known):
            return None
        return self.direction.form(at)

    def in_use_beyond(self, known: Collection[str]) -> tuple[str, ...]:
        """The fields that are set and are not ``known``, the warm-up's included: a caller that
        knows only those must refuse this algorithm, as it would ignore what it does not know.

        >>> from dpscaffold import scaffold
        >>> scaffold().in_use_beyond(PROVED_FIELDS), scaffold().in_use_beyond(["name"])[:2]
        ((), ('direction', 'finish'))
        """
        own = tuple(
            one.name
            for one in fields(self)
            if one.name not in known and getattr(self, one.name) != _default(one)
        )
        return own if self.warm_up is None else (*own, *self.warm_up.in_use_beyond(known))

    def check_upload(self, upload: Upload) -> None:
        """Refuse an upload that contains a private slot."""
        leaked = [name for name in upload.totals if name in self.private]
        if leaked:
            raise BadInput(
                "private-memory-uploaded",
                f"algorithm.finish uploads {leaked[0]!r}, which algorithm.private keeps at the "
                f"user; leave it out of the totals, or out of private",
            )

    def phase(self, round: int, warm_rounds: int) -> Algorithm:
        """The algorithm of this round (rounds count from 1): the warm-up first, then the real
        one."""
        return self.warm_up if self.warm_up is not None and round <= warm_rounds else self


def _default(one: Field[Any]) -> object:
    """A field's default; :data:`MISSING`, which equals nothing, where there is none."""
    return one.default if one.default_factory is MISSING else one.default_factory()
