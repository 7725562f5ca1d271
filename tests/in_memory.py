"""An exchange inside one process, with every fault of a network at will."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dpscaffold.deployment.protocol.exchange import Accept
from dpscaffold.deployment.protocol.messages import SignedMessage, pack, unpack


class Crash(BaseException):
    """A process that dies on the spot. Not an :class:`Exception`, so nothing on the way can
    swallow it."""


@dataclass
class Delivery:
    """What happens to one attempt to deliver a message, in :class:`InMemory`.

    ``lose_ask`` and ``lose_answer`` drop it on the way there or back, ``repeat`` delivers it twice,
    ``delay`` keeps the question until the next exchange, ``late`` keeps the answer until then.
    """

    lose_ask: bool = False
    lose_answer: bool = False
    repeat: bool = False
    delay: bool = False
    late: bool = False


@dataclass
class InMemory:
    """An exchange inside one process, with every fault of a network at will.

    ``sites`` maps names to what answers there; ``fate(site, message, attempt)`` decides what
    becomes of each attempt; ``order(names)`` in which order its messages are delivered. A site
    that raises :class:`Crash` is restarted by ``restart(name)``, which returns what answers from
    then on. All messages cross as bytes.
    """

    sites: dict[str, Callable[[SignedMessage], SignedMessage]]
    attempts: int = 1
    fate: Callable[[str, SignedMessage, int], Delivery] = lambda site, message, attempt: Delivery()
    order: Callable[[list[str]], list[str]] = lambda names: names
    restart: Callable[[str], Callable[[SignedMessage], SignedMessage]] | None = None
    on_attempt: Callable[[], None] = lambda: None
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    answered: list[tuple[str, bytes]] = field(default_factory=list)
    _waiting_asks: list[tuple[str, bytes]] = field(default_factory=list)
    _waiting_answers: list[tuple[str, bytes]] = field(default_factory=list)

    def ask(
        self, questions: Mapping[str, SignedMessage], accept: Accept
    ) -> dict[str, SignedMessage]:
        """As any exchange; what earlier exchanges delayed arrives first."""
        found: dict[str, SignedMessage] = {}
        stray = self._waiting_answers
        self._waiting_answers = []
        late_asks, self._waiting_asks = self._waiting_asks, []
        for name, raw in late_asks:
            stray += [(name, answer) for answer in self._deliver(name, raw)]
        for name, raw in stray:
            self._take(name, raw, questions, accept, found)
        for attempt in range(self.attempts):
            self.on_attempt()
            for name in self.order([name for name in questions if name not in found]):
                self._attempt(name, questions, attempt, accept, found)
            if len(found) == len(questions):
                break
        return found

    def _attempt(
        self,
        name: str,
        questions: Mapping[str, SignedMessage],
        attempt: int,
        accept: Accept,
        found: dict[str, SignedMessage],
    ) -> None:
        fate = self.fate(name, questions[name], attempt)
        raw = pack(questions[name])
        self.sent.append((name, raw))
        if fate.lose_ask:
            return
        if fate.delay:
            self._waiting_asks.append((name, raw))
            return
        answers = self._deliver(name, raw)
        if fate.repeat:
            answers += self._deliver(name, raw)
        if fate.late:
            self._waiting_answers += [(name, answer) for answer in answers]
        elif not fate.lose_answer:
            for answer in answers:
                self._take(name, answer, questions, accept, found)

    def _deliver(self, name: str, raw: bytes) -> list[bytes]:
        message = unpack(raw)
        if message is None or name not in self.sites:
            return []
        try:
            answer = pack(self.sites[name](message))
        except Crash:
            if self.restart is None:
                raise
            self.sites[name] = self.restart(name)
            return []
        self.answered.append((name, answer))
        return [answer]

    @staticmethod
    def _take(
        name: str,
        raw: bytes,
        questions: Mapping[str, SignedMessage],
        accept: Accept,
        found: dict[str, SignedMessage],
    ) -> None:
        answer = unpack(raw)
        if answer is not None and name in questions and accept(name, answer):
            found.setdefault(name, answer)
