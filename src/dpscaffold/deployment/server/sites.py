"""Sites: the engine whose users are parties on machines of their own, asked through an exchange.

It gathers like any other engine: the same two laws of aggregation in the same order of additions,
so that a rehearsal ends bit for bit where the simulator does. What is its own is bookkeeping: an
upload is acknowledged only once the checkpoint that contains it is on disk, and what each site
remembers is mirrored as the sum of the totals that were applied. Private slots are not mirrored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Slots, Upload
from dpscaffold.config import Run
from dpscaffold.deployment.protocol.enrolment import EnrolledRun, SignedExchange, enrol_again
from dpscaffold.deployment.protocol.messages import (
    Json,
    SignedMessage,
    is_finite,
    vector_digests,
)
from dpscaffold.deployment.protocol.shapes import upload_lengths
from dpscaffold.deployment.server.bounds import upload_bounds
from dpscaffold.engine import Memory
from dpscaffold.engine.aggregate import aggregate
from dpscaffold.engine.state import Draw, RoundUploads
from dpscaffold.runs.journal import Anchor


class Stalled(RuntimeError):
    """Too few sites answered, too often; the last checkpoint is kept and can be resumed (exit
    status 4)."""

    code = "stalled"


@dataclass(frozen=True)
class Patience:
    """How few answers make a round void, how often that may happen in a row, and how many seconds
    lie between."""

    quorum: int = 1
    voids: int = 3
    pause: float = 5.0


@dataclass
class RoundTally:
    """What became of a round's questions, for status and ledgers: the sites that counted a
    participation again, and everybody's reason for saying no."""

    fresh: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    #: The norm of each site's move, and the largest that an honest one can have, where it is known.
    norms: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    voids: int = 0
    seconds: float = 0.0

    def is_past(self, names: Iterable[str]) -> bool:
        """Whether all sites have taken part in later rounds, which this server does not know of: it
        was restored from a backup. The round is passed over."""
        return all(self.reasons.get(name) == "stale-round" for name in names)


class Sites:
    """Gathers from sites. Call :meth:`saved` when the checkpoint that holds :meth:`to_dict` is on
    disk; only then are the last round's uploads acknowledged."""

    def __init__(
        self,
        setting: Run,
        enrolled: EnrolledRun,
        post: SignedExchange,
        patience: Patience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.setting, self.enrolled, self.post = setting, enrolled, post
        self.patience, self._sleep = patience or Patience(), sleep
        self.memories = Memory(setting.algorithm.shared, setting.task.parameters, setting.users)
        self.acknowledged: dict[str, str] = {}
        self.last = RoundTally()
        self._applied: dict[str, str] = {}
        self._restore: set[str] = set()
        #: The lengths of the vectors of an upload of this round, what was sent for it, and what is
        #: known of the participants' memories.
        self._wanted: dict[str, int] = {}
        self._round: tuple[Algorithm, Broadcast] | None = None
        self._slots: dict[int, Slots] = {}
        #: The largest norm of parameters that were sent; None where it is not known of all rounds.
        self._farthest: float | None = 0.0

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> RoundUploads:
        """One round at those who take part; void, and asked again, where too few answer."""
        if self._applied:
            raise RuntimeError("the last round is not saved, so it cannot be acknowledged")
        began = time.perf_counter()
        self._wanted = upload_lengths(phase, self.setting.task.parameters)
        self._round = (phase, broadcast)
        self._slots = {user: self.memories.recall([user]) for user in draw.active.tolist()}
        if self._farthest is not None:
            self._farthest = max(self._farthest, float(broadcast.params.norm()))
        names = {self.enrolled.names[user]: user for user in draw.active.tolist()}
        vectors, tally = broadcast_vectors(broadcast), RoundTally()
        while True:
            uploads = self._ask(broadcast.round, names, vectors, tally)
            wanted = min(self.patience.quorum, len(self.post.still_admitted(names)))
            if len(uploads) >= wanted or tally.is_past(names):
                break
            tally.voids += 1
            if tally.voids > self.patience.voids:
                raise Stalled(
                    f"round {broadcast.round} was void {tally.voids} times: {len(uploads)} of "
                    f"{len(names)} sites answered and the quorum is {self.patience.quorum} "
                    f"({in_words(tally.reasons)})"
                )
            self._sleep(self.patience.pause)
        gathered = self._apply(broadcast, draw, names, uploads)
        tally.seconds = time.perf_counter() - began
        self.last = tally
        return gathered

    def _ask(
        self,
        round: int,
        names: Mapping[str, int],
        vectors: Mapping[str, np.ndarray],
        tally: RoundTally,
    ) -> dict[str, SignedMessage]:
        """The uploads of one attempt. A site that lost its memory or missed the draw is helped and
        asked once more."""
        uploads, no = self._ask_once(round, tuple(names), vectors, tally)
        lost, missed, mismatched = (
            tuple(name for name, reason in no.items() if reason == why)
            for why in ("unknown-run", "bad-draw", "state-mismatch")
        )
        self._restore |= {*mismatched, *lost}
        if lost or missed:
            enrol_again(self.post, self.enrolled, lost + missed)
        again = tuple(name for name in names if name in (*mismatched, *lost, *missed))
        if again:
            more, refused = self._ask_once(round, again, vectors, tally)
            uploads |= more
            no = {name: reason for name, reason in no.items() if name not in again} | refused
        tally.reasons = no
        counted = {n for n, message in uploads.items() if message.header.get("fresh") is True}
        tally.fresh = tuple(sorted({*tally.fresh, *counted}))
        return uploads

    def _ask_once(
        self,
        round: int,
        names: tuple[str, ...],
        vectors: Mapping[str, np.ndarray],
        tally: RoundTally,
    ) -> tuple[dict[str, SignedMessage], dict[str, str]]:
        digests = vector_digests(vectors)
        questions = {name: self._task(round, name, vectors, digests) for name in names}
        yes, no = self.post.ask(questions)
        fitting = [name for name, one in yes.items() if fits_round(one, round, self._wanted)]
        used: dict[str, SignedMessage] = {}
        for name, bounds in self._bounds(fitting).items():
            norms = upload_norms(yes[name])
            tally.norms[name] = (norms["params"], bounds.get("params"))
            if not is_too_large(norms, bounds):
                used[name] = yes[name]
        self._restore -= set(used)
        return used, no | {name: "bad-upload" for name in yes if name not in used}

    def _task(
        self,
        round: int,
        name: str,
        vectors: Mapping[str, np.ndarray],
        digests: Mapping[str, bytes],
    ) -> SignedMessage:
        fields: dict[str, Json] = {
            "plan": self.enrolled.plan,
            "round": round,
            "acknowledged": self.acknowledged.get(name, ""),
        }
        sent = dict(vectors)
        if name in self._restore:
            sent |= self._mirrored(name)
        return self.post.message("task", self.enrolled.run, name, fields, sent, digests)

    def _mirrored(self, name: str) -> dict[str, np.ndarray]:
        slots = self.memories.recall([self.enrolled.names.index(name)])
        return {f"restore.{key}": as_array(value[0]) for key, value in slots.items()}

    def _bounds(self, names: Iterable[str]) -> dict[str, Mapping[str, float]]:
        """The largest norms of these sites' honest uploads, where they are known."""
        assert self._round is not None
        users = {name: self.enrolled.names.index(name) for name in names}
        slots = {user: self._slots[user] for user in users.values()}
        found = upload_bounds(self.setting, *self._round, slots, self._farthest)
        return {name: found[user] or {} for name, user in users.items()}

    def _apply(
        self,
        broadcast: Broadcast,
        draw: Draw,
        names: Mapping[str, int],
        uploads: Mapping[str, SignedMessage],
    ) -> RoundUploads:
        """The two laws, in the order of users, and the mirror of what each has added."""
        answered = {user: uploads[name] for name, user in names.items() if name in uploads}
        if not answered:
            return self._nothing(broadcast)
        parts, kept = [], []
        for user, message in answered.items():
            upload, after = read_upload(message, self._slots[user])
            parts.append(([user], upload))
            kept.append(([user], after))
            self._applied[self.enrolled.names[user]] = str(message.header["upload"])
        self._slots = {}
        for given in kept:
            self.memories.keep(*given)
        return aggregate(self.setting, draw, broadcast, parts)

    def _nothing(self, broadcast: Broadcast) -> RoundUploads:
        """A round that nobody answered: nothing moves."""
        lengths = upload_lengths(self.setting.algorithm, self.setting.task.parameters)
        totals = {
            name.partition(".")[2]: torch.zeros(size)
            for name, size in lengths.items()
            if name != "params"
        }
        return RoundUploads(Upload(torch.zeros_like(broadcast.params), totals), ())

    def take_up(self, done: int) -> None:
        """Called once, before the round after ``done``: what an engine kept of it is taken up."""

    def saved(self) -> None:
        """The checkpoint is on disk: what it contains may be acknowledged."""
        self.acknowledged |= self._applied
        self._applied = {}

    def settle(self, model: Tensor | None) -> tuple[dict[str, SignedMessage], dict[str, str]]:
        """The last acknowledgement to all, and the model where the run is over."""
        questions = {}
        for name in self.enrolled.names:
            fields: dict[str, Json] = {
                "acknowledged": self.acknowledged.get(name, ""),
                "over": model is not None,
            }
            vectors = {} if model is None else {"model.params": as_array(model)}
            if name in self._restore:
                vectors |= self._mirrored(name)
            questions[name] = self.post.message("settle", self.enrolled.run, name, fields, vectors)
        return self.post.ask(questions)

    def to_dict(self) -> dict[str, Any]:
        """This engine's part of a checkpoint: acknowledgements, counts and mirror."""
        return {
            "acknowledged": {**self.acknowledged, **self._applied},
            "seen": dict(self.post.seen),
            "totals": dict(self.post.totals),
            "heads": {n: [dict(vars(h)) for h in heads] for n, heads in self.post.heads.items()},
            "restore": sorted(self._restore),
            "farthest": self._farthest,
            "mirror": self.memories.to_dict(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.acknowledged = dict(saved["acknowledged"])
        self._applied = {}
        self._restore = set(saved["restore"])
        self._farthest = saved.get("farthest")
        for known, key in ((self.post.seen, "seen"), (self.post.totals, "totals")):
            for name, count in saved[key].items():
                known[name] = max(count, known.get(name, 0))
        for name, heads in saved.get("heads", {}).items():
            kept = Anchor.read_all(heads, "the checkpoint")
            self.post.heads.setdefault(name, kept)
        if saved["mirror"]["users"]:
            self.memories.restore(saved["mirror"])


def broadcast_vectors(broadcast: Broadcast) -> dict[str, np.ndarray]:
    """What is sent to the participants of a round, by the names of a message's vectors."""
    shared = {f"shared.{name}": as_array(value) for name, value in broadcast.shared.items()}
    return {"params": as_array(broadcast.params), **shared}


def is_upload(answer: SignedMessage, round: int, wanted: Mapping[str, int]) -> bool:
    """Whether an answer is an upload of this round, with vectors of the wanted lengths."""
    found = {name: len(vector) for name, vector in answer.vectors.items()}
    named = isinstance(answer.header.get("upload"), str)
    return answer.header.get("round") == round and named and found == wanted


def fits_round(answer: SignedMessage, round: int, wanted: Mapping[str, int]) -> bool:
    """Whether an answer is an upload of this round that can be added without harm."""
    return is_upload(answer, round, wanted) and all(map(is_finite, answer.vectors.values()))


def upload_norms(answer: SignedMessage) -> dict[str, float]:
    """The norm of every vector of an upload."""
    return {name: float(np.linalg.norm(vector)) for name, vector in answer.vectors.items()}


def is_too_large(norms: Mapping[str, float], bounds: Mapping[str, float]) -> bool:
    """Whether an upload is larger than any that honest steps can give."""
    return any(norms[key] > bound for key, bound in bounds.items())


def read_upload(message: SignedMessage, before: Slots) -> tuple[Upload, Slots]:
    """A message's upload as a stack of one, and the site's slots once it is applied: what it kept
    where it says so, else what was known and the total. The upload shares the message's memory."""
    stacked = {name: torch.from_numpy(_writeable(v))[None] for name, v in message.vectors.items()}
    totals: dict[str, Tensor] = {}
    after = dict(before)
    for label, value in stacked.items():
        kind, _, name = label.partition(".")
        if kind == "kept":
            totals[name], after[name] = value - before[name], value
        elif kind == "totals":
            totals[name] = value
            if name in before:
                after[name] = before[name] + value
    return Upload(stacked["params"], totals), after


def _writeable(vector: np.ndarray) -> np.ndarray:
    """The vector as PyTorch takes it; a copy only of one that cannot be written to."""
    return vector if vector.flags.writeable else vector.copy()


def as_array(value: Tensor) -> np.ndarray:
    return np.ascontiguousarray(value.detach().cpu().numpy(), "<f4")


def in_words(reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()))
