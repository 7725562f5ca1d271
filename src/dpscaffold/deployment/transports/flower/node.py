"""A site's connection: a node of our own on Flower's Fleet interface.

One process, outgoing connections to one port, no bundle ever fetched. A stock node starts a fresh
process per message and runs the server's code; this one answers with the installed package and
takes a twentieth of the time. After a kill the SuperLink still holds the node for online and
refuses to activate it for most of a minute; the node's id is stable and every request is signed, so
the node simply goes on with the id it had.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from dpscaffold.deployment.protocol.messages import SignedMessage
from dpscaffold.deployment.provision import write_whole
from dpscaffold.deployment.transports.flower.wire import (
    AGAIN,
    from_objects,
    question_id,
    to_records,
)

#: What can go wrong with the connection, the SuperLink or its answers; none of it is fatal.
TROUBLE = (httpx.HTTPError, RuntimeError, OSError, ValueError, ObjectPullError, ObjectPushError)

#: Seconds: the node is offline for the SuperLink when nothing came for so long.
HEARTBEAT = 30.0
#: Seconds between two polls: after an answer, and at most; each idle poll waits a little longer.
QUICK, SLOW, GROWTH = 0.25, 3.0, 1.15
#: Seconds between two attempts to reach a server that is away, at first and at most.
FIRST_RETRY, LAST_RETRY = 0.5, 5.0
#: Seconds that a message's objects are waited for, at first and at most: a server that was killed
#: while it sent them never will, and the next one's messages stand behind that message.
FIRST_PATIENCE, LAST_PATIENCE = 2.0, 60.0
#: Parts of a message that are on their way at a time: more would share a slow link, and each has to
#: be there within the gate's time limit.
PARTS = 2


class Refusal(RuntimeError):
    """The server does not know this node, or takes its clock for wrong."""


@dataclass(frozen=True)
class Address:
    """Where the server is and how it proves to be it; without ``ca`` in plain text."""

    server: str
    ca: bytes | None


@dataclass(frozen=True)
class Incoming:
    """A message as the SuperLink announces it: its head without content, and its objects' ids."""

    head: Message
    tree: ObjectTree

    @property
    def run(self) -> int:
        """The Flower run that carries it."""
        return int(self.head.metadata.run_id)

    @property
    def again(self) -> bool:
        """Whether the server says that it lost the answer."""
        return bool(self.head.metadata.message_type == AGAIN)


@dataclass
class LastAnswer:
    """The last answer, in memory, and in which Flower run it left whole. A copy of its question is
    known by its id before anything of it is fetched: an answer that the server has is not sent
    again, and one that it lost is, as it was."""

    question: str = ""
    signed: SignedMessage | None = None
    run: int | None = None

    def fits(self, asked: Incoming) -> bool:
        """Whether a message is a copy of the question that was answered last."""
        return self.signed is not None and asked.head.metadata.group_id == self.question

    def is_there(self, asked: Incoming) -> bool:
        """Whether the server has the answer to this copy already."""
        return self.run == asked.run and not asked.again


class Fleet:
    """The connection of one node: activation, heartbeats, one message at a time."""

    def __init__(self, address: Address, key: EllipticCurvePrivateKey, remembered: Path) -> None:
        self._address, self._key, self._remembered = address, key, remembered
        self._public = public_key_to_bytes(key.public_key())
        self._client = self._connect()
        self._pulse: Heartbeat | None = None
        self._patience = FIRST_PATIENCE
        self.node: Node | None = None
        self.clock_difference: float | None = None

    def _connect(self) -> FleetHttpClient:
        return FleetHttpClient.from_server_address(
            self._address.server,
            self._address.ca is None,
            self._address.ca,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(self._key, self._key.public_key()),
            ],
        )

    def join(self) -> str:
        """Become online; returns a word on how."""
        try:
            answer = self._client.ActivateNode(
                ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT)
            )
            self.node = Node(node_id=answer.node_id)
            write_whole(self._remembered, str(answer.node_id).encode())
            how = "activated"
        except httpx.HTTPStatusError as error:
            self._note_clock(error.response)
            if error.response.status_code == 401 or not self._remembered.exists():
                raise self._refusal(error.response) from error
            # Online already for the SuperLink (we died a moment ago), or unknown to it.
            self.node = Node(node_id=int(self._remembered.read_text()))
            try:
                self.beat()
            except httpx.HTTPStatusError as second:
                self.node = None
                raise self._refusal(second.response) from second
            how = "went on"
        self._pulse = Heartbeat(self._connect(), self.node)
        return how

    def _note_clock(self, response: httpx.Response) -> None:
        said = response.headers.get("date")
        if said:
            server = parsedate_to_datetime(said)
            self.clock_difference = (datetime.now(UTC) - server).total_seconds()

    def _refusal(self, response: httpx.Response) -> Refusal:
        off = self.clock_difference
        if response.status_code not in (401, 412):
            return Refusal(f"the server refuses this node ({response.status_code})")
        if off is not None and not -304 < off < 4:
            return Refusal(
                f"the server refuses this node: the clocks differ by {abs(off):.0f} s (this one is "
                f"{'ahead' if off > 0 else 'behind'}); set them"
            )
        return Refusal(
            "the server refuses this node: its key is not registered there; the federation's "
            "operator runs dpscaffold server admit"
        )

    def beat(self) -> None:
        """Say that this node is online."""
        answer = self._client.SendNodeHeartbeat(
            SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT)
        )
        if not answer.success:
            raise RuntimeError("the SuperLink does not know this node any more")

    def announced(self) -> Incoming | None:
        """The next message, if there is one; nothing of its content is fetched yet."""
        if self._pulse is not None and self._pulse.lost:
            raise RuntimeError("the SuperLink does not know this node any more")
        answer = self._client.PullMessages(PullMessagesRequest(node=self.node))
        if not answer.messages_list:
            return None
        head, tree = message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]
        assert self.node is not None
        TaskIdentity.run_id, TaskIdentity.node_id = head.metadata.run_id, self.node.node_id
        TaskIdentity.task_id = 0
        return Incoming(head, tree)

    def fetch(self, asked: Incoming) -> SignedMessage | None:
        """A message's content; None where the server has taken it back. Objects that are not there
        yet are waited for as long as others come."""
        patience, self._patience = self._patience, min(2 * self._patience, LAST_PATIENCE)
        assert self.node is not None
        pull = make_pull_object_fn_protobuf(self._client.PullObject, self.node, asked.run)
        came = [time.monotonic()]

        def while_they_come(part: str) -> bytes:
            try:
                content = bytes(pull(part))
            except ObjectUnavailableError:
                if time.monotonic() - came[0] > patience:
                    raise RuntimeError("the objects of a message do not come") from None
                raise
            came[0] = time.monotonic()
            return content

        try:
            contents = pull_objects(
                [part.object_id for part in iterate_object_tree(asked.tree)],
                while_they_come,
                max_concurrent_pulls=PARTS,
                max_time=None,
                max_tries_per_object=None,
                initial_backoff=0.05,
                backoff_cap=1.0,
            )
        except ObjectPullError:
            self._patience = FIRST_PATIENCE
            return None
        self._patience = FIRST_PATIENCE
        return from_objects(asked.tree.object_id, contents)

    def confirm(self, asked: Incoming) -> None:
        """Tell the server that a message needs no further answer."""
        assert self.node is not None
        confirm = make_confirm_message_received_fn_protobuf(
            self._client.ConfirmMessageReceived, self.node, asked.run
        )
        confirm(asked.tree.object_id)

    def reply(self, asked: Incoming, signed: SignedMessage) -> None:
        """Send the answer. What it took to compute is not sent: zero seconds."""
        reply = Message(content=to_records(signed), reply_to=asked.head)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            answer = self._client.PushMessages(
                PushMessagesRequest(
                    node=self.node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                )
            )
            push = make_push_object_fn_protobuf(
                self._client.PushObject, self.node, reply.metadata.run_id, answer.session_id
            )
            push_objects(
                get_all_nested_objects(reply),
                push,
                object_ids_to_push=set(answer.objects_to_push),
                max_concurrent_pushes=PARTS,
            )

    def drop(self) -> None:
        """Forget the connection, so that the next step is to join again."""
        if self._pulse is not None:
            self._pulse.stop()
        self._pulse, self.node = None, None

    def leave(self) -> None:
        """Say goodbye, if there is anybody to say it to."""
        node = self.node
        self.drop()
        try:
            if node is not None:
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
        except TROUBLE:
            pass
        self._client.close()


class Heartbeat:
    """Heartbeats from a thread of their own, so that a long computation is not taken for a
    death."""

    def __init__(self, client: FleetHttpClient, node: Node) -> None:
        self._client, self._node = client, node
        self._stopped = threading.Event()
        self.lost = False
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT * random.uniform(0.3, 0.4)):
            try:
                answer = self._client.SendNodeHeartbeat(
                    SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT)
                )
                self.lost = self.lost or not answer.success
            except TROUBLE as error:
                response = getattr(error, "response", None)
                self.lost = self.lost or getattr(response, "status_code", 0) == 401

    def stop(self) -> None:
        """No further heartbeat."""
        self._stopped.set()


def serve(
    fleet: Fleet,
    answer: Callable[[SignedMessage], SignedMessage],
    stop: threading.Event,
    say: Callable[[str], None],
    rest: Callable[[], None] = lambda: None,
) -> None:
    """Answer messages, one at a time, until told to stop; whatever fails is tried again. ``rest``
    is called when nothing has come for some seconds."""
    wait, retry, said, last = QUICK, FIRST_RETRY, "", LastAnswer()
    try:
        while not stop.is_set():
            try:
                if fleet.node is None:
                    say(f"online ({fleet.join()})")
                asked = fleet.announced()
                retry, said = FIRST_RETRY, ""
                if asked is None:
                    stop.wait(wait * random.uniform(0.9, 1.1))
                    if wait < SLOW <= wait * GROWTH:
                        rest()
                    wait = min(SLOW, wait * GROWTH)
                    continue
                respond(fleet, asked, answer, last)
                wait = QUICK
            except TROUBLE as error:
                sentence = str(error) if isinstance(error, Refusal) else _in_short(error)
                if sentence != said:
                    say(sentence)
                said = sentence
                fleet.drop()
                stop.wait(retry * random.uniform(0.8, 1.2))
                retry = min(2 * retry, LAST_RETRY)
    finally:
        fleet.leave()


def respond(
    fleet: Fleet,
    asked: Incoming,
    answer: Callable[[SignedMessage], SignedMessage],
    last: LastAnswer,
) -> None:
    """Answer one message, and confirm it once the answer has left; a copy of the last question
    costs no fetching, and usually no sending."""
    if not last.fits(asked):
        message = fleet.fetch(asked)
        if message is None:
            return
        last.run, last.signed = None, answer(message)
        last.question = question_id(message)
    if not last.is_there(asked):
        assert last.signed is not None
        fleet.reply(asked, last.signed)
        last.run = asked.run
    fleet.confirm(asked)


def certificate_trouble(error: BaseException) -> str | None:
    """What to say where a connection failed for the server's certificate."""
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return None
    reason = re.sub(r"^.*certificate verify failed: | \(_ssl.*$", "", str(error))
    return (
        f"the server's certificate is not of this federation, not for this host, or expired "
        f"({reason}); compare ca.crt and 'server' in site.toml with the invitation"
    )


def _in_short(error: BaseException) -> str:
    wrong = certificate_trouble(error)
    if wrong is not None:
        return wrong
    return f"the server is away ({type(error).__name__}); trying again"


def clock_of(address: Address, seconds: float = 10.0) -> float:
    """How far this clock is ahead of the server's, in seconds, from its Date header; raises where
    it cannot be reached or is not who it should be."""
    import ssl

    verify: ssl.SSLContext | bool = False
    if address.ca is not None:
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        verify.load_verify_locations(cadata=address.ca.decode("ascii"))
    scheme = "http" if address.ca is None else "https"
    with httpx.Client(verify=verify, timeout=seconds) as client:
        before = time.time()
        answer = client.get(f"{scheme}://{address.server}/")
        said = parsedate_to_datetime(answer.headers["date"]).timestamp()
        return (before + time.time()) / 2 - said
