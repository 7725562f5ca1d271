"""The server's side: an :class:`~dpscaffold.deployment.protocol.exchange.Exchange` over Flower's
Grid.

A process of our own opens a Flower run, claims its task with the secret that it shares with the
SuperLink, and sends and fetches messages in a loop of its own: Flower's loop sleeps 3 s and does
not say who is missing. Flower hands a message out once, so what a node had claimed when it died
never comes back; a message that is not confirmed is therefore sent again, as it is, after waits
that double. If the SuperLink goes
away a new Flower run is opened and the question asked again: Flower's run is transport, nothing
more.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, run_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from dpscaffold.deployment.protocol.exchange import Accept, ExchangeStopped
from dpscaffold.deployment.protocol.messages import SignedMessage, canonical
from dpscaffold.deployment.provision import Member
from dpscaffold.deployment.transports.flower.gate import ControlInterceptor
from dpscaffold.deployment.transports.flower.wire import (
    AGAIN,
    Made,
    from_records,
    inflated,
    question_id,
    to_records,
)
from dpscaffold.errors import BadInput

TROUBLE = (httpx.HTTPError, RuntimeError, OSError, ValueError, ObjectPullError, ObjectPushError)
_LAST_PAUSE = 3.0
_TASK_BEAT = 8.0
#: Seconds that sites still have for their answers once the server was asked to stop.
_GRACE = 5.0
#: Answers that are fetched at the same time, at most.
_FETCHES = 64
#: Seconds within which an answer is usually whole once it was announced.
_AT_ONCE = 1.0
#: The kinds of questions for which a silent site is passed over; all others are worth a deadline.
_PASSING = ("task", "key")
#: Earlier questions of a silent site whose late answers are still listened for.
_LATE = 4

#: A Flower run needs a bundle. This one holds nothing; no site of ours would fetch it anyway.
_BUNDLE = {
    "pyproject.toml": b"""[project]
name = "dpscaffold-messages"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "dpscaffold"
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
""",
    "nothing.py": b"app = None\n",
}


@dataclass(frozen=True)
class SuperLinkAddress:
    """The SuperLink's loopback side, and what it takes to speak there; ``ca`` None: plain text."""

    address: str
    ca: bytes | None
    secret: bytes


@dataclass
class Traffic:
    """What an exchange did, for status and benchmarks: seconds, messages sent again, reconnections,
    and the bytes of the vectors and headers that crossed."""

    seconds: float = 0.0
    again: int = 0
    opened: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


@dataclass(frozen=True)
class Envelope:
    """What Flower is given to carry: a node, the content, the question's identity, whether a site
    that has answered it shall answer again, and for how many seconds it is kept."""

    node: int
    content: RecordDict
    question: str
    again: bool
    seconds: float


class OpenRun:
    """One open Flower run: registers the roster's keys, claims the run's task, keeps it alive."""

    def __init__(self, office: SuperLinkAddress, members: Iterable[Member]) -> None:
        self._office = office
        register(office, members)
        token = self._claim(self._start())
        self.grid = HttpGrid(
            runtime_api_address=office.address,
            insecure=office.ca is None,
            root_certificates=office.ca,
            token=token,
        )
        # Flower's own retries block for ever and answer a 401 with SIGINT to this very process.
        self.grid._retry_invoker = None
        given = self.grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        self.grid.set_run(run_from_proto(given.run))
        self._run = given.run.run_id
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(_FETCHES, thread_name_prefix="reply")
        self._coming: dict[str, Future[Message]] = {}
        threading.Thread(target=self._beat, daemon=True, name="task-heartbeat").start()

    def _start(self) -> int:
        control = control_client(self._office)
        content, _ = build_fab_from_files(_BUNDLE)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        started = control.StartRun(
            StartRunRequest(
                fab=fab_to_proto(fab),
                override_config=user_config_to_proto({}),
                federation=NOOP_FEDERATION_ID,
            )
        )
        control.close()
        return int(started.run_id)

    def _claim(self, run: int) -> str:
        """The token of our run's task; a run of somebody else is claimed and left unserved."""
        client = RuntimeHttpClient.from_server_address(
            server_address=self._office.address,
            insecure=self._office.ca is None,
            root_certificates=self._office.ca,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                SuperExecAuthHttpInterceptor(
                    master_secret=self._office.secret,
                    protected_methods={"/flwr.proto.Runtime/AcquireTask"},
                ),
            ],
        )
        for _ in range(50):
            got = client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
            if got.HasField("task") and got.task.run_id == run:
                client.close()
                return str(got.token)
            time.sleep(0 if got.HasField("task") else 0.2)
        raise RuntimeError("the SuperLink does not give us the task of our run")

    def _beat(self) -> None:
        while not self._stopped.wait(_TASK_BEAT):
            with suppress(*TROUBLE):  # the next message will notice
                self.grid._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def nodes(self) -> dict[str, int]:
        """The online nodes by public key (PEM, stripped)."""
        return {
            node.public_key.decode().strip()
            if isinstance(node.public_key, bytes)
            else str(node.public_key).strip(): node.node_id
            for node in self.grid.get_nodes()
        }

    def send(self, envelopes: Iterable[Envelope]) -> list[str]:
        """Send; gives the ids of the messages, empty for one that Flower did not take."""
        messages = [
            Message(
                content=envelope.content,
                dst_node_id=envelope.node,
                message_type=AGAIN if envelope.again else "query",
                ttl=envelope.seconds,
                group_id=envelope.question,
            )
            for envelope in envelopes
        ]
        return list(self.grid.push_messages(messages))

    def is_coming(self, identity: str) -> bool:
        """Whether the answer to a message is on its way."""
        return identity in self._coming

    def is_confirmed(self, identity: str) -> bool:
        """Whether the node has confirmed a message: Flower then deletes its object."""
        asked = PullObjectRequest(node=self.grid.node, run_id=self._run, object_id=identity)
        return not self.grid._runtime_client.PullObject(asked).object_found

    def withdraw(self, identities: Iterable[str]) -> None:
        """Take messages back: who has not fetched their objects never will."""
        client, node = self.grid._runtime_client, self.grid.node
        confirm = make_confirm_message_received_fn_protobuf(
            client.ConfirmMessageReceived, node, self._run
        )
        for identity in identities:
            confirm(identity)

    def replies(self, asked: Iterable[str]) -> list[tuple[str, Message | None]]:
        """The answers to these messages that are whole by now, or None for one that never will be.

        Flower announces an answer before its objects are there, and waits three minutes for those
        of a node that died meanwhile. Each is therefore fetched next to the others, and nobody's
        round, deadline or end waits for it.
        """
        wanted = [identity for identity in asked if identity not in self._coming]
        fresh = self._announced(wanted) if wanted else {}
        wait(fresh.values(), _AT_ONCE)
        self._coming |= fresh
        done = [identity for identity, fetched in self._coming.items() if fetched.done()]
        return [(identity, _whole(self._coming.pop(identity))) for identity in done]

    def _announced(self, asked: list[str]) -> dict[str, Future[Message]]:
        """The answers to these messages that have begun to come, each on its way."""
        found = self.grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        heads = zip(found.messages_list, found.message_object_trees, strict=True)
        return {
            head.metadata.reply_to_message_id: self._threads.submit(
                self._fetch, head.metadata.message_id, tree
            )
            for head, tree in heads
        }

    def _fetch(self, identity: str, tree: ObjectTree) -> Message:
        """One answer, with all its objects."""
        client, node = self.grid._runtime_client, self.grid.node
        pull = make_pull_object_fn_protobuf(client.PullObject, node, self._run)

        def unless_stopped(part: str) -> bytes:
            if self._stopped.is_set():
                raise ObjectPullError(part, "the connection was given up")
            return bytes(pull(part))

        parts = [part.object_id for part in iterate_object_tree(tree)]
        contents = pull_objects(
            parts,
            unless_stopped,
            max_time=None,  # as long as objects come: Flower gives a sender up that is gone
            max_tries_per_object=None,
            initial_backoff=0.05,
            backoff_cap=1.0,
        )
        confirm = make_confirm_message_received_fn_protobuf(
            client.ConfirmMessageReceived, node, self._run
        )
        confirm(identity)
        message = inflated(identity, contents)
        message.metadata.__dict__["_message_id"] = identity
        return message

    def give_up(self) -> None:
        """Neither beat nor fetch any more, over a connection that was lost."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self, completed: bool) -> None:
        """Report the end to the SuperLink, if it is there."""
        self.give_up()
        status = "completed" if completed else "failed"
        with suppress(*TROUBLE):
            self.grid._runtime_client.PushTaskOutput(
                PushTaskOutputRequest(sub_status=status, details="")
            )
        self.grid.close()


def _whole(fetched: Future[Message]) -> Message | None:
    """What was fetched; None where some of it never came."""
    try:
        return fetched.result()
    except ObjectPullError:
        return None


def control_client(office: SuperLinkAddress) -> ControlHttpClient:
    """A client of the SuperLink's control paths."""
    return ControlHttpClient.from_server_address(
        office.address,
        office.ca is None,
        office.ca,
        interceptors=[
            ControlInterceptor(office.secret),
            RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
        ],
    )


def register(office: SuperLinkAddress, members: Iterable[Member]) -> None:
    """Make the members' node keys known to the SuperLink; known ones stay."""
    control = control_client(office)
    for member in members:
        try:
            control.RegisterNode(RegisterNodeRequest(public_key=member.node_key.encode()))
        except httpx.HTTPStatusError as error:
            if "in use" not in error.response.text and error.response.status_code != 409:
                raise
    control.close()


def flower_bytes(office: SuperLinkAddress) -> int:
    """All bytes that Flower has counted between its nodes and the SuperLink, both ways, since the
    SuperLink was started: requests and answers that carry messages, and their objects."""
    control = control_client(office)
    runs = control.ListRuns(ListRunsRequest()).run_dict.values()
    control.close()
    return sum(run.bytes_sent + run.bytes_recv for run in runs)


@dataclass
class Asked:
    """One question that a site has not answered: when it is due to be sent, how long is waited
    after that, the last copy that was sent, and what is known of it."""

    question: SignedMessage
    content: RecordDict
    due: float
    wait: float
    identity: str | None = None
    confirmed: bool = False
    lost: bool = False

    def postpone(self, now: float, longest: float) -> None:
        """Look again after the wait, which doubles."""
        self.due, self.wait = now + self.wait, min(2 * self.wait, longest)


@dataclass
class FlowerExchange:
    """Messages over Flower. ``deadline`` and ``resend`` are in seconds; the deadline counts from
    the last time the SuperLink was reached again, so its own absence costs no site its round.
    ``stop`` says whether this process was asked to stop: then sites that are asked have a few
    seconds left, and a SuperLink that is away is waited for no longer.

    A question is sent again after ``resend`` seconds, then after twice as long each time, and only
    while the site has not confirmed it, which it does once its answer has left. A site that let a
    deadline pass is asked, but not waited for, until it is heard again; rounds wait for it only
    where fewer than ``enough`` others said yes.
    """

    office: SuperLinkAddress
    members: tuple[Member, ...]
    deadline: float = 60.0
    resend: float = 6.0
    poll: float = 0.1
    say: Callable[[str], None] = lambda sentence: None
    stop: Callable[[], bool] = lambda: False
    enough: int = 1
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    traffic: Traffic = field(default_factory=Traffic)
    #: The sites whose connection was open when something was last sent.
    reachable: frozenset[str] = frozenset()
    #: The sites that let a deadline pass and have not been heard since, and those of them whose
    #: connection was closed.
    silent: set[str] = field(default_factory=set)
    _gone: set[str] = field(default_factory=set)
    #: Whose answer comes under which id; late answers too.
    _waiting: dict[str, str] = field(default_factory=dict)
    _grid: OpenRun | None = None

    def ask(
        self, questions: Mapping[str, SignedMessage], accept: Accept
    ) -> dict[str, SignedMessage]:
        """As :class:`~dpscaffold.deployment.protocol.exchange.Exchange`."""
        begun, found, pause, reported = self.clock(), dict[str, SignedMessage](), 0.2, False
        while True:
            try:
                if self._grid is None:
                    self._grid = OpenRun(self.office, self.members)
                    self._waiting = {}
                    self.traffic.opened += 1
                self._ask_over(self._grid, questions, accept, found)
                self.traffic.seconds += self.clock() - begun
                return found
            except TROUBLE as error:
                if not self.traffic.opened:
                    _refuse_for_good(error)
                if not reported:
                    self.say(f"the SuperLink is away ({type(error).__name__}); trying again")
                if self._grid is not None:
                    self._grid.give_up()
                reported, self._grid = True, None
                self._pause(pause)
                pause = min(2 * pause, _LAST_PAUSE)

    def _pause(self, seconds: float) -> None:
        """Wait before the SuperLink is tried again."""
        until = self.clock() + seconds
        while self.clock() < until:
            if self.stop():
                raise ExchangeStopped("asked to stop while the SuperLink was away")
            self.sleep(self.poll)

    def _ask_over(
        self,
        grid: OpenRun,
        questions: Mapping[str, SignedMessage],
        accept: Accept,
        found: dict[str, SignedMessage],
    ) -> None:
        began = self.clock()
        until, told_at, made = began + self.deadline, None, Made()
        asked = {
            name: Asked(question, to_records(question, made), began, self.resend)
            for name, question in questions.items()
            if name not in found
        }
        while self._awaited(asked, found) and self.clock() < until:
            now = self.clock()
            if self.stop():
                told_at = told_at or now
                if now - told_at > _GRACE:
                    raise ExchangeStopped(
                        f"asked to stop while {', '.join(asked)} had not answered"
                    )
            self._send_due(grid, asked, until - now)
            for name, signed in self._pull(grid, asked):
                if name in questions and accept(name, signed) and name in asked:
                    found[name] = signed
                    del asked[name]
                    self._take_back(grid, [name])
            if asked:
                self.sleep(self.poll)
        self._pass_over(grid, asked)

    def _awaited(self, asked: Mapping[str, Asked], found: Mapping[str, SignedMessage]) -> bool:
        """Whether there is still somebody to wait for."""
        if not asked:
            return False
        passing = all(one.question.header.get("kind") in _PASSING for one in asked.values())
        yes = sum(answer.header.get("status") == "yes" for answer in found.values())
        return not passing or yes < self.enough or not self.silent.issuperset(asked)

    def _pass_over(self, grid: OpenRun, asked: Mapping[str, Asked]) -> None:
        """Those who did not answer are not waited for again until they are heard. What they have
        not begun to fetch is taken back: nobody wants it any more."""
        self.silent |= set(asked)
        self._gone |= set(asked) - self.reachable
        self._take_back(grid, asked)

    def _take_back(self, grid: OpenRun, names: Iterable[str]) -> None:
        """Withdraw every copy that was sent to these sites; late answers are listened for."""
        for name in names:
            stale = [identity for identity, to in self._waiting.items() if to == name]
            grid.withdraw(stale)
            for identity in stale[:-_LATE]:
                del self._waiting[identity]

    def _send_due(self, grid: OpenRun, asked: Mapping[str, Asked], seconds: float) -> None:
        """Send what is due and not confirmed."""
        now = self.clock()
        due = [name for name, one in asked.items() if one.due <= now]
        sending = [name for name in due if self._is_wanted(grid, asked[name], now)]
        if not sending:
            return
        self.traffic.again += sum(asked[name].identity is not None for name in sending)
        reached = self._push(grid, sending, asked, seconds)
        for name in sending:
            if name in reached:
                asked[name].postpone(now, self.deadline)
            else:
                asked[name].due = now + 1.0

    def _is_wanted(self, grid: OpenRun, one: Asked, now: float) -> bool:
        """Whether a copy of a question must be sent, now that it is due; else it is looked at
        later."""
        if one.identity is None or one.lost:
            return True
        if not grid.is_confirmed(one.identity):
            return True  # also where an answer was announced: its sender may have died
        # Confirmed a wait ago, and no answer is on its way: it was lost.
        one.lost = one.confirmed and not grid.is_coming(one.identity)
        one.confirmed = True
        if not one.lost:
            one.postpone(now, self.deadline)
        return one.lost

    def _push(
        self, grid: OpenRun, names: list[str], asked: Mapping[str, Asked], seconds: float
    ) -> set[str]:
        """Send; note under which id each answer will come. Returns who could be reached."""
        online = grid.nodes()
        keys = {member.name: member.node_key.strip() for member in self.members}
        self.reachable = frozenset(name for name, key in keys.items() if key in online)
        back = self._gone & self.reachable
        self.silent, self._gone = self.silent - back, self._gone - back
        names = [name for name in names if name in self.reachable]
        envelopes = [
            Envelope(
                online[keys[name]],
                asked[name].content,
                question_id(asked[name].question),
                asked[name].lost,
                2 * self.deadline + seconds + 10.0,
            )
            for name in names
        ]
        ids = grid.send(envelopes) if envelopes else []
        reached = set()
        for name, identity in zip(names, ids, strict=True):
            if identity:
                self._waiting[identity] = name
                self.traffic.bytes_out += _size(asked[name].question, asked[name].identity is None)
                asked[name].identity, asked[name].lost = identity, False
                asked[name].confirmed = False
                reached.add(name)
        return reached

    def _pull(self, grid: OpenRun, asked: Mapping[str, Asked]) -> list[tuple[str, SignedMessage]]:
        if not self._waiting:
            return []
        arrived = []
        for identity, reply in grid.replies(list(self._waiting)):
            name = self._waiting.pop(identity, None)
            if name is None:
                continue
            if reply is None or reply.has_error():
                self._note_lost(asked.get(name), identity)
                continue
            self.silent.discard(name)
            self._gone.discard(name)
            signed = from_records(reply.content)
            self.traffic.bytes_in += _size(signed)
            arrived.append((name, signed))
        return arrived

    def _note_lost(self, one: Asked | None, identity: str) -> None:
        """Flower will bring no answer to this copy: another is due at once."""
        if one is not None and one.identity == identity:
            one.lost, one.due = True, min(one.due, self.clock() + 1.0)

    def close(self, completed: bool = True) -> None:
        """End the Flower run."""
        if self._grid is not None:
            self._grid.close(completed)
            self._grid = None


def _refuse_for_good(error: BaseException) -> None:
    """What no waiting fixes: a wrong secret, or a certificate of another authority."""
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401:
        raise BadInput(
            "wrong-secret",
            "the SuperLink refuses this server (401): superexec.secret is not the one that it was "
            "started with",
        ) from error
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        raise BadInput(
            "wrong-certificate",
            f"the SuperLink's certificate is not of this federation, or not for this host "
            f"({error})",
        ) from error


def _size(signed: SignedMessage, whole: bool = True) -> int:
    """Bytes of a message; of a copy, whose vectors do not travel again, those of its header."""
    vectors = sum(vector.nbytes for vector in signed.vectors.values()) if whole else 0
    return vectors + len(canonical(signed.header)) + len(signed.signature)
