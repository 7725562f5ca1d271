"""Who carries messages: the :class:`Exchange` that an engine asks through.

An exchange promises little: it sends messages, sends an unanswered one again *as it is*, and hands
back the answers that the asker accepts. It may lose, repeat, delay and reorder; the protocol bears
all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from dpscaffold.deployment.protocol.messages import SignedMessage

#: Whether a reply that arrived from the named site counts as its answer. It is called with every
#: reply, also with one that comes second.
Accept = Callable[[str, SignedMessage], bool]


class Exchange(Protocol):
    """Carries messages to sites by name and brings back their answers."""

    def ask(
        self, questions: Mapping[str, SignedMessage], accept: Accept
    ) -> dict[str, SignedMessage]:
        """Send one message to each named site and wait, until the deadline, for answers that
        ``accept`` takes. Sites that did not answer are missing from the result."""
        ...


class ExchangeStopped(Exception):
    """The asker was asked to stop while it waited. Nothing is lost: who has answered repeats its
    stored answer when the run goes on."""
