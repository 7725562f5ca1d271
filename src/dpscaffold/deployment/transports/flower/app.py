"""For federations that already run Flower: the same server and sites inside a Flower App.

A stock ``flower-supernode`` executes the bundle that it is sent, so the site trusts whoever submits
it; see ``examples/flower-app/README.md`` for what is lost by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from dpscaffold.deployment.protocol.exchange import Accept
from dpscaffold.deployment.protocol.messages import SignedMessage
from dpscaffold.deployment.provision import Member, read_signing_key
from dpscaffold.deployment.site.answer import Site
from dpscaffold.deployment.site.file import read_site_file
from dpscaffold.deployment.site.memory import StateFolder
from dpscaffold.deployment.site.work import opener
from dpscaffold.deployment.transports.flower.operation import logger_of
from dpscaffold.deployment.transports.flower.run import Envelope, FlowerExchange, SuperLinkAddress
from dpscaffold.deployment.transports.flower.serving import run_deployed
from dpscaffold.deployment.transports.flower.wire import from_records, to_records
from dpscaffold.errors import BadInput

WHO = "who"


def site_path(node: Mapping[str, Any], run: Mapping[str, Any]) -> Path:
    """Which ``site.toml`` a node represents: its ``site`` setting or, in Flower's simulation, its
    place in the run's list of ``sites``."""
    if "site" in node:
        return Path(str(node["site"]))
    listed = [part for part in str(run.get("sites", "")).split(",") if part]
    place = node.get("partition-id")
    if not isinstance(place, int) or not 0 <= place < len(listed):
        raise BadInput(
            "missing-argument",
            "start the node with --node-config site=… (the path of site.toml), or list the sites' "
            "files in the run's configuration (sites = 'a/site.toml,b/site.toml')",
        )
    return Path(listed[place])


def answer_message(message: Message, path: Path) -> Message:
    """A site's answer to one message, with state from disk before and to disk after."""
    file = read_site_file(path)
    if WHO in message.content.config_records:
        name = RecordDict({WHO: ConfigRecord({"name": file.name})})
        return Message(content=name, reply_to=message)
    state = StateFolder(file.state, file.name)
    log = logger_of(file, lambda sentence: None)
    try:
        site = Site(
            file.name,
            file.coordinator,
            read_signing_key(file.signing_key),
            state,
            lambda: file.policy,
            opener(file, path.resolve().parent, torch.device("cpu"), log),
            keeps_keys=False,
            log=log,
        )
        answered = site.answer(from_records(message.content))
    finally:
        state.close()
    return Message(content=to_records(answered), reply_to=message)


class AppGrid:
    """A ServerApp's grid, with its nodes known by the names they give. A node that lies about its
    name gets messages that it cannot answer for."""

    def __init__(self, grid: Any, members: tuple[Member, ...], seconds: float) -> None:
        self.grid, self._members = grid, members
        self._names: dict[str, int] = {}
        self._seconds = seconds

    def nodes(self) -> dict[str, int]:
        """Node ids by the members' keys."""
        known = set(self._names.values())
        fresh = [node for node in self.grid.get_node_ids() if node not in known]
        if fresh:
            asked = [
                Message(
                    content=RecordDict({WHO: ConfigRecord({"asks": 1})}),
                    dst_node_id=node,
                    message_type="query",
                )
                for node in fresh
            ]
            for reply in self.grid.send_and_receive(asked, timeout=self._seconds):
                if not reply.has_error() and WHO in reply.content.config_records:
                    name = str(reply.content.config_records[WHO]["name"])
                    self._names[name] = reply.metadata.src_node_id
        return {
            member.node_key.strip(): self._names[member.name]
            for member in self._members
            if member.name in self._names
        }

    def send(self, envelopes: Iterable[Envelope]) -> list[str]:
        """Send; a stock node answers every copy."""
        messages = [
            Message(
                content=envelope.content,
                dst_node_id=envelope.node,
                message_type="query",
                ttl=envelope.seconds,
            )
            for envelope in envelopes
        ]
        return list(self.grid.push_messages(messages))

    def is_coming(self, identity: str) -> bool:
        """Never known here."""
        return False

    def is_confirmed(self, identity: str) -> bool:
        """Stock nodes confirm what they have only received, and may die after that."""
        return False

    def withdraw(self, identities: Iterable[str]) -> None:
        """Nothing is taken back: Flower's grid cannot."""

    def replies(self, asked: Iterable[str]) -> list[tuple[str, Message | None]]:
        """The answers to these messages, as Flower waits for them."""
        return [(one.metadata.reply_to_message_id, one) for one in self.grid.pull_messages(asked)]

    def close(self, completed: bool) -> None:
        """The run is Flower's to end."""


class AppExchange(FlowerExchange):
    """Messages over the grid that Flower hands to a ServerApp."""

    def ask(
        self, questions: Mapping[str, SignedMessage], accept: Accept
    ) -> dict[str, SignedMessage]:
        """As :class:`~dpscaffold.deployment.protocol.exchange.Exchange`; the run ends with its
        SuperLink."""
        found: dict[str, SignedMessage] = {}
        assert self._grid is not None
        self._ask_over(self._grid, questions, accept, found)
        return found


def serve_app(grid: Any, run: Mapping[str, Any]) -> str:
    """A deployed run inside a ServerApp; the run's configuration names ``plan``, ``server`` and
    ``out``."""
    for key in ("plan", "server", "out"):
        if not run.get(key):
            raise BadInput(
                "missing-argument", f"{key} is missing; give it with flwr run --run-config {key}=…"
            )

    def carrier(members: tuple[Member, ...], deadline: float) -> FlowerExchange:
        post = AppExchange(SuperLinkAddress("", None, b""), members, deadline, poll=0.5)
        given: Any = AppGrid(grid, members, deadline)
        post._grid = given
        return post

    out = Path(str(run["out"]))
    resume = (out / "config.toml").exists()
    plan, server = Path(str(run["plan"])), Path(str(run["server"]))

    def echo(sentence: str, aside: bool) -> None:
        print(sentence, flush=True)

    return run_deployed(plan, out, server, resume, [], [], False, False, echo, carrier)
