"""Secure sums at the server: it passes signed keys on, and adds masked integers.

The server sees the sum of a list of sites, or nothing: one upload that is missing leaves all others
hidden. An attempt in which anybody is missing is therefore void. The next attempt asks those who
answered, with fresh noise and fresh masks, and every attempt counts at the sites. Sites that do not
answer are passed over for some rounds; the draw stays as it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dpscaffold.algorithms import Algorithm, Broadcast
from dpscaffold.config import Run
from dpscaffold.deployment.protocol.enrolment import (
    EnrolledRun,
    SignedExchange,
    enrol_again,
    members_in,
)
from dpscaffold.deployment.protocol.masks import BadKeys, SignedKey, from_vector, verified_keys
from dpscaffold.deployment.protocol.messages import Json, SignedMessage, vector_digests
from dpscaffold.deployment.protocol.sums import SUM, Attempt
from dpscaffold.deployment.server.sites import (
    Patience,
    RoundTally,
    Sites,
    Stalled,
    as_array,
    in_words,
    is_upload,
)
from dpscaffold.engine.aggregate import upload_of_mean
from dpscaffold.engine.state import Draw, RoundUploads
from dpscaffold.runs.folder import RunFolder

#: The attempt in progress, in the run folder.
ATTEMPT = "attempt.json"
#: A site that does not answer is asked again after 1, 2, 4, … rounds, at most after this many.
LONGEST_ABSENCE = 8
#: Refusals after which a site is asked for its key and stays among the candidates.
_ASK_KEY = ("stale-key", "attempt-used", "unknown-run", "bad-draw")


@dataclass(frozen=True)
class Absence:
    """A site is passed over for some ``rounds``, before the round ``until``."""

    until: int
    rounds: int


class SecureSites(Sites):
    """Gathers sums from sites. The attempt in progress is kept in the run folder: a server that is
    started again repeats the same question, which costs the sites nothing."""

    def __init__(
        self,
        setting: Run,
        enrolled: EnrolledRun,
        post: SignedExchange,
        patience: Patience,
        sleep: Callable[[float], None],
        folder: RunFolder,
    ) -> None:
        super().__init__(setting, enrolled, post, patience, sleep)
        self.folder = folder
        assert setting.sums is not None
        self.sums = setting.sums
        self._keys: dict[str, SignedKey] = {}
        self._absent: dict[str, Absence] = {}
        self._last = (0, 0)
        self._repeat: Attempt | None = None

    # --- one round

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> RoundUploads:
        """The sum of one round over the draw, or over those of the draw who are there."""
        if self._applied:
            raise RuntimeError("the last round is not saved, so it cannot be acknowledged")
        began, tally = time.perf_counter(), RoundTally()
        names = {self.enrolled.names[user]: user for user in draw.active.tolist()}
        vectors = {"params": as_array(broadcast.params)}
        while True:
            attempt = self._next(broadcast.round, tuple(names), tally)
            uploads = self._tried(broadcast.round, attempt, vectors, tally)
            if attempt is not None and len(uploads) == len(attempt.keys):
                break
            if attempt is not None and tally.is_past(attempt.names):
                return self._nothing(broadcast)
            self._give_up_or_wait(broadcast.round, len(names), len(uploads), tally)
        users = [names[name] for name in uploads]
        gathered = self._summed(phase, broadcast, users, uploads)
        self._applied = {name: str(got.header["upload"]) for name, got in uploads.items()}
        tally.seconds = time.perf_counter() - began
        self.last = tally
        return gathered

    def _next(self, round: int, names: tuple[str, ...], tally: RoundTally) -> Attempt | None:
        """The next attempt at a round; None where too few sites are there."""
        if self._repeat is not None:
            attempt, self._repeat = self._repeat, None
            return attempt
        there = [name for name in names if not self._passed_over(name, round)]
        if len(there) < self.sums.least:
            there = list(names)
        self._ask_keys(round, [name for name in there if name not in self._keys], tally)
        keys = tuple(self._keys[name] for name in there if name in self._keys)
        if len(keys) < self.sums.least:
            return None
        last = self._last[1] if self._last[0] == round else 0
        attempt = Attempt(last + 1, keys)
        self._last = (round, attempt.number)
        self.folder.write_text(ATTEMPT, json.dumps({"round": round, **attempt.identity}) + "\n")
        return attempt

    def _passed_over(self, name: str, round: int) -> bool:
        return name in self._absent and round < self._absent[name].until

    def _ask_keys(self, round: int, names: list[str], tally: RoundTally) -> None:
        """Ask sites for their keys; who does not give one is passed over for a while."""
        run, fields = self.enrolled.run, {"plan": self.enrolled.plan}
        yes, no = self.post.ask({n: self.post.message("key", run, n, fields) for n in names})
        session = members_in(self.post, self.enrolled).session(run, self.enrolled.plan)
        for name, answer in yes.items():
            try:
                key = SignedKey.read(answer.header.get("key"))
                self._keys |= verified_keys(session, [key], {name: self.post.publics[name]})
            except BadKeys:
                no[name] = "bad-keys"
                continue
            self._absent.pop(name, None)
            label = (answer.header.get("last_round"), answer.header.get("last_attempt"))
            if label[0] == round and type(label[1]) is int:
                self._last = max(self._last, (round, label[1]))
        self._miss(round, no)
        tally.reasons |= no

    def _miss(self, round: int, names: Iterable[str]) -> None:
        """Pass sites over, each time for twice as many rounds."""
        for name in names:
            self._keys.pop(name, None)
            before = self._absent.get(name, Absence(0, 0)).rounds
            rounds = min(max(1, 2 * before), LONGEST_ABSENCE)
            self._absent[name] = Absence(round + rounds, rounds)

    def _tried(
        self,
        round: int,
        attempt: Attempt | None,
        vectors: Mapping[str, np.ndarray],
        tally: RoundTally,
    ) -> dict[str, SignedMessage]:
        """The uploads of one attempt, by name, in the order of its list."""
        if attempt is None:
            return {}
        digests = vector_digests(vectors)
        fields: dict[str, Json] = {
            "plan": self.enrolled.plan,
            "round": round,
            "attempt": attempt.number,
            "keys": [dict(vars(key)) for key in attempt.keys],
        }
        run, questions = self.enrolled.run, {}
        for name in attempt.names:
            own = fields | {"acknowledged": self.acknowledged.get(name, "")}
            questions[name] = self.post.message("task", run, name, own, vectors, digests)
        yes, no = self.post.ask(questions)
        words = {SUM: self.setting.task.parameters * self.sums.grid.bits // 32}
        unfit = [name for name, got in yes.items() if not is_upload(got, round, words)]
        no |= dict.fromkeys(unfit, "bad-upload")
        tally.reasons = no
        counted = {name for name, got in yes.items() if got.header.get("fresh") is True}
        tally.fresh = tuple(sorted({*tally.fresh, *counted}))
        self._follow(round, no)
        return {name: yes[name] for name in attempt.names if name in yes and name not in no}

    def _follow(self, round: int, no: Mapping[str, str]) -> None:
        """What follows from refusals: another key, another enrolment, or some rounds without."""
        lost = tuple(name for name, reason in no.items() if reason in ("unknown-run", "bad-draw"))
        if lost:
            enrol_again(self.post, self.enrolled, lost)
        self._miss(round, [name for name, reason in no.items() if reason not in _ASK_KEY])
        for name in no:
            self._keys.pop(name, None)

    def _give_up_or_wait(self, round: int, drawn: int, answered: int, tally: RoundTally) -> None:
        tally.voids += 1
        if tally.voids > self.patience.voids:
            raise Stalled(
                f"round {round} was void {tally.voids} times: {answered} of {drawn} sites "
                f"answered, and a secure sum needs all members of a list of {self.sums.least} or "
                f"more ({in_words(tally.reasons)}); {self._remedy(tally)}"
            )
        if answered < self.sums.least:
            self._absent.clear()
            self._sleep(self.patience.pause)

    def _remedy(self, tally: RoundTally) -> str:
        """What helps a run that has stalled."""
        if "voids-spent" not in tally.reasons.values():
            return "start the sites that are away, then resume the run with --resume"
        return (
            f"secure.voids is {self.sums.secure.voids} in the plan, and that many attempts without "
            f"a result are used up; start another run with a larger one, which each site.toml must "
            f"allow too"
        )

    def _summed(
        self,
        phase: Algorithm,
        broadcast: Broadcast,
        users: list[int],
        uploads: Mapping[str, SignedMessage],
    ) -> RoundUploads:
        """The mean of a list, from the sum of its integers."""
        bits = self.sums.grid.bits
        total = np.zeros(self.setting.task.parameters, self.sums.grid.dtype)
        for got in uploads.values():
            total += from_vector(got.vectors[SUM], bits)
        mean = self.sums.mean(self.sums.grid.integers(total), users)
        return RoundUploads(upload_of_mean(self.setting, phase, broadcast, mean), tuple(users))

    # --- resume

    def take_up(self, done: int) -> None:
        """Repeat the attempt that was in progress, if there is one."""
        saved, round = self.folder.read_json(ATTEMPT), done + 1
        if saved is not None and saved.get("round") == round:
            keys = tuple(SignedKey.read(key) for key in saved["keys"])
            self._repeat = Attempt(int(saved["attempt"]), keys)
            self._last = (round, self._repeat.number)
            self._keys = {key.name: key for key in keys}
