"""The server's half of private training in somebody's own Flower app: a strategy.

It aggregates as a deployed server does (the same two laws, the same bound on honest uploads), over
Flower's own loop. It never sees a record, and no part of the guarantee rests on it: each client
counts and noises by itself (:class:`~dpscaffold.flower.PrivateTraining`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import nn

from dpscaffold.algorithms import Algorithm, Broadcast, scaffold
from dpscaffold.config import AlgorithmSettings, Run, make_run
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.deployment.protocol.agreement import Offer, offer_of
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.protocol.messages import (
    Json,
    SignedMessage,
    digest,
    fresh_id,
)
from dpscaffold.deployment.protocol.shapes import upload_lengths
from dpscaffold.deployment.server.agreed import roster_of
from dpscaffold.deployment.server.bounds import upload_bounds
from dpscaffold.deployment.server.sites import (
    as_array,
    broadcast_vectors,
    fits_round,
    is_too_large,
    read_upload,
    upload_norms,
)
from dpscaffold.deployment.transports.flower import require
from dpscaffold.deployment.transports.flower.wire import from_records, to_records
from dpscaffold.engine import Draw, Memory, State
from dpscaffold.engine.aggregate import aggregate
from dpscaffold.engine.server import announced
from dpscaffold.errors import BadInput
from dpscaffold.flower.client import OwnModel
from dpscaffold.flower.kept import ClientAccount, KeptRun, SavedRun
from dpscaffold.privacy.mechanism import PAIRS, Relation
from dpscaffold.privacy.numbers import round_up
from dpscaffold.randomness.streams import Randomness

_LOG = logging.getLogger("flwr")
CPU = torch.device("cpu")

#: What a federation of sites promises and a Flower app cannot.
NOT_PROMISED = (
    "no policy of the site: whoever submits the app decides what runs on the clients",
    "no signed plans: Flower and its server are trusted to deliver this very app",
    "no bit-for-bit rehearsal, no approval by a person, no audit log",
    "nothing for what your own code sends: metrics, logs, other functions of the app",
    "nothing for preprocessing that was fitted on the records",
)


@dataclass(frozen=True)
class ClientGuarantee:
    """The ε of a Flower run: the largest that any client has stated.

    It is each client's own: its noise alone, all rounds that it took part in, whatever the server
    and the other clients do with what they see (the bound ``cap``). Of a client that was asked more
    often than it has answered, or that has not answered since the run went on, it is all that was
    granted.
    """

    epsilon: float
    granted: float
    delta: float
    neighbours: str
    participations: int
    clients: int

    adversary = "the server together with all other clients"
    theorem = "adaptive composition of the participations of a client (the bound 'cap')"
    not_promised = NOT_PROMISED

    def __str__(self) -> str:
        shown = round_up(self.epsilon)
        return (
            f"ε = {shown} (at most {round_up(self.granted)}) at δ = {self.delta:g} for "
            f"{self.neighbours}, against {self.adversary}; {self.participations} participations, "
            f"{self.clients} clients, {self.theorem}. Not promised: "
            f"{'; '.join(self.not_promised)}."
        )


@dataclass
class _Enrolled:
    """A run that has begun: who takes part, and where it stands."""

    run: str
    nodes: tuple[int, ...]
    sizes: tuple[int, ...]
    setting: Run
    state: State
    memories: Memory
    #: The round that is under way.
    asked: tuple[Algorithm, Broadcast, Draw] | None = None
    #: Clients of a run that goes on, until they are asked what they have spent.
    unasked: set[int] = field(default_factory=set)


class Strategy(FlowerStrategy):  # type: ignore[misc]
    """Trains a module with DP-SCAFFOLD, or another algorithm, over clients that run
    :class:`~dpscaffold.flower.PrivateTraining`.

    Clients are those that are connected when the first round begins. One that is away or refuses is
    passed over. ``guarantee`` is what the clients have stated so far.

    With ``state`` a ServerApp that ended, or was killed, goes on after the last finished round when
    it is started again: the same run, the same clients, no new grant. A run that is over gives its
    model again. Without ``state``, or in another folder, every start is a run of its own, which
    costs each client a grant.

    Args:
        module: The ``nn.Module``, the same as the clients'; its weights are x⁰.
        plan: Rounds, local steps, rates, the share of clients and of records.
        privacy: The mechanism; its noise is drawn by the clients, from their operating systems.
        shape: The shape of one x.
        algorithm: An installed algorithm; by default SCAFFOLD.
        loss: One of ``dpscaffold.tasks.LOSSES``.
        clients: How many clients must accept the plan before the first round.
        wait: How many seconds to wait until that many are connected.
        state: A folder at the server that holds this one run.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        privacy: Gaussian,
        shape: tuple[int, ...],
        algorithm: Algorithm | None = None,
        loss: str = "softmax",
        clients: int = 2,
        wait: float = 300.0,
        state: Path | str | None = None,
    ) -> None:
        require()
        if not isinstance(privacy, Gaussian) or not privacy.noise > 0 or privacy.unit != "record":
            raise BadInput(
                "no-noise",
                "privacy gives no guarantee for single records; give Gaussian(clip=…, noise=…) "
                "with noise above 0 and unit='record'",
            )
        if plan.steps_by_user is not None:
            raise BadInput(
                "not-applicable",
                "plan.steps_by_user is given, and Flower's clients have no order; leave it out",
            )
        if clients < 1:
            raise BadInput("out-of-range", f"clients is {clients}; give 1 or more")
        plan.cohort_size(clients)  # refuses a share that selects nobody
        self.model, self.clients, self.wait = OwnModel(module, tuple(shape), loss), clients, wait
        self.model.check()
        self.task = self.model.task()
        self.offer = _offer(self.model, plan, privacy, algorithm or scaffold())
        identity = digest(self.offer.to_dict(), self.task.parameters)
        self._kept = None if state is None else KeptRun(Path(state), identity)
        #: The reason codes of clients that refused, by node id.
        self.refused: dict[int, str] = {}
        self._run: _Enrolled | None = None
        self._acknowledged: dict[int, str] = {}
        self._restore: set[int] = set()
        self._heads: dict[int, Json] = {}
        self._accounts: dict[int, ClientAccount] = {}

    # --- what Flower calls

    def summary(self) -> None:
        """Log what is trained."""
        plan, privacy = self.offer.plan, self.offer.privacy
        _LOG.info("\t├── %s, %d rounds", self.offer.algorithm.name, plan.rounds)
        _LOG.info("\t└── %s", privacy)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Flower's loop over the plan's rounds, from the module's own weights.

        Args:
            grid: Flower's grid.
            initial_arrays: x⁰ as a state dict, if not the module's weights.
            num_rounds: At most the plan's rounds; by default all of them.
            timeout: How long to wait for the clients of a round, in seconds.
            train_config: Refused: clients take the plan alone.
            evaluate_config: Refused: clients evaluate nothing.
            evaluate_fn: Evaluates the model at the server, on public data.
        """
        rounds = self.offer.plan.rounds if num_rounds is None else num_rounds
        if not 1 <= rounds <= self.offer.plan.rounds:
            raise BadInput(
                "out-of-range",
                f"num_rounds is {rounds}; the plan, for which clients grant ε, has "
                f"{self.offer.plan.rounds}",
            )
        if train_config or evaluate_config:
            raise BadInput(
                "not-applicable",
                "train_config or evaluate_config is given; clients take the plan alone, so leave "
                "them out",
            )
        with self._kept.locked() if self._kept else nullcontext():
            return self._start(grid, initial_arrays, rounds, timeout, evaluate_fn)

    def _start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None,
        rounds: int,
        timeout: float,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> Result:
        """Flower's loop over the rounds that are left, which it counts from 1."""
        self._run = None
        self._accounts.clear()
        arrays = self._arrays(self.task.initial(0)) if initial_arrays is None else initial_arrays
        run, done = self._resumed(), 0
        if run is not None:
            self._run, done = run, run.state.round
            arrays = self._model(run)
            if done >= rounds:
                return self._finished(run, arrays, rounds, evaluate_fn)
            self._await_clients(run, grid)
            _LOG.info("The run %s goes on after round %d.", run.run, done)

        def evaluated(round: int, found: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            return evaluate_fn(done + round, found)

        evaluate = evaluated if evaluate_fn else None
        result = super().start(grid, arrays, rounds - done, timeout, None, None, evaluate)
        _LOG.info("%s", self.guarantee or "No client took part, so no ε was spent.")
        for name, value in vars(result).items():
            if isinstance(value, dict):
                setattr(result, name, {done + round: one for round, one in value.items()})
        return result

    def _finished(
        self,
        run: _Enrolled,
        arrays: ArrayRecord,
        rounds: int,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> Result:
        """The model of a run whose rounds are done: its ServerApp may have been killed before it
        stored it. No client is asked."""
        done = run.state.round
        if done > rounds:
            raise BadInput(
                "run-exists",
                f"state is {self._kept and self._kept.folder}, which holds a run with {done} "
                f"rounds done, and num_rounds is {rounds}; give {done} or more, or name another "
                f"folder to begin a new run",
            )
        _LOG.info("The run %s has all of its %d rounds; no client is asked.", run.run, done)
        _LOG.info("%s", self.guarantee)
        found = evaluate_fn(done, arrays) if evaluate_fn else None
        metrics = {} if found is None else {done: found}
        return Result(arrays=arrays, evaluate_metrics_serverapp=metrics)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The plan to all clients before the first round; then x and c to those who are drawn."""
        if self._run is None:
            self._run = self._enrol(arrays, grid)
        run = self._run
        self._ask_spent(run, grid)
        setting, state = run.setting, run.state
        number = state.round + 1
        phase = setting.algorithm.phase(number, setting.warm_rounds)
        streams = Randomness(setting.plan.public_seed)
        drawn = streams.cohort(number, setting.users, setting.cohort_size)
        draw = Draw(drawn, drawn)
        broadcast = announced(setting, state, draw, run.memories, phase)
        run.asked = (phase, broadcast, draw)
        vectors = broadcast_vectors(broadcast)
        tasks = [self._task(run, user, vectors) for user in draw.active.tolist()]
        self._save(run)  # who is asked, before it is asked
        return tasks

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The server's move, from the uploads that fit."""
        run = self._run
        if run is None or run.asked is None:
            raise BadInput("not-applicable", "no round is under way; call start")
        phase, broadcast, draw = run.asked
        uploads = self._uploads(run, replies)
        parts = []
        for user in sorted(uploads):
            upload, after = read_upload(uploads[user], run.memories.recall([user]))
            parts.append(([user], upload))
            run.memories.keep([user], after)
            self._acknowledged[run.nodes[user]] = str(uploads[user].header["upload"])
        server = run.state.server
        if parts:
            mean = aggregate(run.setting, draw, broadcast, parts, phase).mean
            server = phase.update(server, mean, run.setting.plan.server_rate)
        run.state = run.state.moved(server, [run.setting])
        run.asked = None
        self._save(run)  # the next round acknowledges these uploads
        said = self.guarantee
        metrics = {"answered": len(parts), "refused": len(self.refused)}
        return self._model(run), MetricRecord(metrics | ({"epsilon": said.epsilon} if said else {}))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: a metric of a client's records would be outside ε."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing."""
        return None

    # --- what was stated

    @property
    def guarantee(self) -> ClientGuarantee | None:
        """The largest ε of any client so far; None before a client was asked."""
        accounts = [one for one in self._accounts.values() if one.may_have_spent]
        privacy = self.offer.privacy
        if not accounts or privacy is None:
            return None
        relation: Relation = "zero-out" if privacy.sampling == "poisson" else "replace-one"
        return ClientGuarantee(
            max(one.worst for one in accounts),
            max(one.granted for one in accounts),
            max(one.delta for one in accounts),
            PAIRS[relation],
            max(one.participations for one in accounts),
            len(accounts),
        )

    # --- messages

    def _enrol(self, arrays: ArrayRecord, grid: Grid) -> _Enrolled:
        """Offer the plan to everybody who is connected."""
        start = self._vector(arrays)
        nodes, run = self._connected(grid), fresh_id()
        sizes = self._sizes(run, nodes, grid)
        order = tuple(sorted(sizes))
        made = self._begun(run, order, tuple(sizes[node] for node in order))
        server = replace(made.state.server, params=start)
        return replace(made, state=replace(made.state, server=server))

    def _begun(self, run: str, nodes: tuple[int, ...], sizes: tuple[int, ...]) -> _Enrolled:
        """A run of these clients, at its start."""
        enrolled = EnrolledRun(run, {}, tuple(map(str, nodes)), "", sizes)
        setting = make_run(
            roster_of(self.offer, enrolled),
            self.task,
            self.offer.build_algorithm(),
            self.offer.plan,
            self.offer.privacy_on(enrolled.names),
        )
        state = State.initial(setting, CPU)
        memories = Memory(setting.algorithm.shared, self.task.parameters, setting.users)
        return _Enrolled(run, nodes, sizes, setting, state, memories)

    # --- a run on the disk

    def _save(self, run: _Enrolled) -> None:
        """Keep where the run stands, if it has a folder."""
        if self._kept is None:
            return
        self._kept.save(
            SavedRun(
                run=run.run,
                nodes=run.nodes,
                sizes=run.sizes,
                state=run.state,
                memories=run.memories.to_dict(),
                acknowledged=dict(self._acknowledged),
                restore=frozenset(self._restore),
                heads=dict(self._heads),
                accounts=self._accounts,
            )
        )

    def _resumed(self) -> _Enrolled | None:
        """The run in the folder, after its last finished round; None where none has begun."""
        saved = None if self._kept is None else self._kept.load()
        if saved is None:
            return None
        run = self._begun(saved.run, saved.nodes, saved.sizes)
        if saved.memories["users"]:
            run.memories.restore(saved.memories)
        self._acknowledged, self._restore = dict(saved.acknowledged), set(saved.restore)
        self._heads = dict(saved.heads)
        self._accounts = {node: replace(a, heard=False) for node, a in saved.accounts.items()}
        return replace(run, state=saved.state, unasked=set(run.nodes))

    def _await_clients(self, run: _Enrolled, grid: Grid) -> None:
        """Wait for the clients of a run that goes on: nobody else can take part in it."""
        until = time.monotonic() + self.wait
        while len(there := set(run.nodes) & set(grid.get_node_ids())) < self.clients:
            if time.monotonic() > until:
                raise BadInput(
                    "too-few-sites",
                    f"{len(there)} of the {len(run.nodes)} clients with which the run began are "
                    f"connected after {self.wait:g} seconds and clients is {self.clients}; a "
                    f"SuperNode that was restarted is another client, so if they are gone begin a "
                    f"new run in another folder, for which clients grant a new budget",
                )
            time.sleep(1)

    def _ask_spent(self, run: _Enrolled, grid: Grid) -> None:
        """Ask the clients of a run that goes on, each once, what they have spent in it. The offer
        of a run that a client knows costs it nothing."""
        asked = sorted(run.unasked.intersection(grid.get_node_ids()))
        run.unasked.difference_update(asked)
        offers = [self._message("offer", run.run, node, {}, {}) for node in asked]
        answers = grid.send_and_receive(offers, timeout=self.wait) if offers else []
        for node, answer in self._answers(answers):
            if node in asked:
                self._accounts[node].hear(*_said(answer))

    def _sizes(self, run: str, nodes: list[int], grid: Grid) -> dict[int, int]:
        """How many records those have who accept the plan."""
        asked = [self._message("offer", run, node, {}, {}) for node in nodes]
        sizes: dict[int, int] = {}
        for node, answer in self._answers(grid.send_and_receive(asked, timeout=self.wait)):
            records = answer.header.get("records")
            granted, delta = (_number(answer, key) for key in ("granted", "delta"))
            if type(records) is int and records > 0:
                sizes[node], self._accounts[node] = records, ClientAccount(granted, delta)
        if len(sizes) < self.clients:
            said = ", ".join(f"{node}: {why}" for node, why in sorted(self.refused.items()))
            raise BadInput(
                "too-few-sites",
                f"{len(sizes)} of {len(nodes)} clients accepted the plan and clients is "
                f"{self.clients} ({said or 'no answer'}); see client.log in their folders",
            )
        return sizes

    def _connected(self, grid: Grid) -> list[int]:
        until = time.monotonic() + self.wait
        while len(nodes := list(grid.get_node_ids())) < self.clients:
            if time.monotonic() > until:
                raise BadInput(
                    "too-few-sites",
                    f"{len(nodes)} clients are connected after {self.wait:g} seconds and clients "
                    f"is {self.clients}; start the others, or raise wait",
                )
            time.sleep(1)
        return sorted(nodes)

    def _task(self, run: _Enrolled, user: int, vectors: dict[str, np.ndarray]) -> Message:
        node, sent = run.nodes[user], dict(vectors)
        if node in self._restore:
            slots = run.memories.recall([user])
            sent |= {f"restore.{name}": as_array(value[0]) for name, value in slots.items()}
        assert run.asked is not None
        self._accounts[node].ask(run.asked[1].round)
        fields: dict[str, Json] = {
            "round": run.asked[1].round,
            "acknowledged": self._acknowledged.get(node, ""),
        }
        return self._message("task", run.run, node, fields, sent)

    def _message(
        self,
        kind: str,
        run: str,
        node: int,
        fields: dict[str, Json],
        vectors: dict[str, np.ndarray],
    ) -> Message:
        heads: list[Json] = [self._heads[node]] if node in self._heads else []
        header: dict[str, Json] = {
            "kind": kind,
            "run": run,
            "offer": self.offer.to_dict(),
            "nonce": fresh_id(),
            "heads": heads,
            **fields,
        }
        content = to_records(SignedMessage(header, vectors))
        return Message(content=content, dst_node_id=node, message_type="train")

    def _answers(self, replies: Iterable[Message]) -> list[tuple[int, SignedMessage]]:
        """The answers that are no refusals, by node."""
        found = []
        for one in replies:
            node = one.metadata.src_node_id
            answer = SignedMessage({}) if one.has_error() else from_records(one.content)
            if answer.header.get("status") != "yes":
                reason = str(answer.header.get("reason", "site-error"))[:40]
                self.refused[node] = reason
                if reason == "state-mismatch":
                    self._restore.add(node)
                _LOG.warning("client %d refused: %s", node, reason)
                continue
            self.refused.pop(node, None)
            self._heads[node] = answer.header.get("ledger")
            found.append((node, answer))
        return found

    def _uploads(self, run: _Enrolled, replies: Iterable[Message]) -> dict[int, SignedMessage]:
        """The uploads of this round that can be added without harm, by user."""
        assert run.asked is not None
        phase, broadcast, draw = run.asked
        wanted = upload_lengths(phase, self.task.parameters)
        found: dict[int, SignedMessage] = {}
        for node, answer in self._answers(replies):
            self._restore.discard(node)
            user = run.nodes.index(node) if node in run.nodes else -1
            drawn = user in draw.active.tolist()
            if not drawn or not fits_round(answer, broadcast.round, wanted):
                self.refused[node] = "bad-upload"
                continue
            slots = {user: run.memories.recall([user])}
            bounds = upload_bounds(run.setting, phase, broadcast, slots)[user] or {}
            if is_too_large(upload_norms(answer), bounds):
                self.refused[node] = "bad-upload"
                continue
            self._accounts[node].answer(*_said(answer))
            found[user] = answer
        return found

    # --- vectors and state dicts

    def _model(self, run: _Enrolled) -> ArrayRecord:
        """Where the run stands: after its last round the output, before it x."""
        last = run.state.round == run.setting.plan.rounds
        return self._arrays(run.state.output if last else run.state.params)

    def _arrays(self, params: torch.Tensor) -> ArrayRecord:
        return ArrayRecord(self.task.filled(params).state_dict())

    def _vector(self, arrays: ArrayRecord) -> torch.Tensor:
        """x⁰ from a state dict of the module."""
        given = arrays.to_torch_state_dict()
        fits = {name: given[name].shape for name in self.task.shapes if name in given}
        if fits != self.task.shapes:
            raise BadInput(
                "wrong-shape",
                f"initial_arrays has not the parameters of the module ({', '.join(fits) or 'none'}"
                f" fit); give ArrayRecord(module.state_dict())",
            )
        flat = [given[name].detach().flatten().float() for name in self.task.shapes]
        return torch.cat(flat)


def _number(answer: SignedMessage, key: str) -> float:
    """A number that a client states; infinite where it states none."""
    said = answer.header.get(key)
    return float(said) if isinstance(said, int | float) and said >= 0 else float("inf")


def _said(answer: SignedMessage) -> tuple[float, int]:
    """ε and the number of participations that a client states."""
    return _number(answer, "epsilon"), int(min(_number(answer, "participations"), 1e9))


def _offer(model: OwnModel, plan: Plan, privacy: Gaussian, algorithm: Algorithm) -> Offer:
    """The plan as every client gets it."""
    settings = AlgorithmSettings.model_validate({"name": algorithm.name, **algorithm.numbers})
    if settings.build() != algorithm:
        raise BadInput(
            "unknown-algorithm",
            f"algorithm {algorithm.name!r} is not one that is installed at the clients; give one "
            f"of dpscaffold.ALGORITHMS",
        )
    return offer_of(model.rows, model.settings, settings, plan, privacy.changed(secret=True))
