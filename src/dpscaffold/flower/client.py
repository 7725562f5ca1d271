"""The client's half of private training in somebody's own Flower app: a mod for a ClientApp.

The mod is given a module and a way to read records; it draws batches, clips, adds noise and keeps
the ledger itself, and it never calls the app's own functions. So what leaves the client is what
the ledger counts. A message that is not a round of :class:`Strategy` is refused.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from dpscaffold.config import TaskSettings
from dpscaffold.deployment.observe.logs import rotating_log
from dpscaffold.deployment.protocol.agreement import Offer, SchemaSettings
from dpscaffold.deployment.protocol.messages import (
    Json,
    Refused,
    SignedMessage,
    Vectors,
    digest,
    fresh_id,
    text_of,
    whole_of,
)
from dpscaffold.deployment.site.checking import (
    check_anchors,
    check_vectors,
    enrolment_of,
    entry_of,
    question_of,
)
from dpscaffold.deployment.site.file import SMALLEST_DELTA, Policy, SiteGrant, check_terms, grant
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.memory import Enrolment, PendingUpload, RunMemory, StateFolder
from dpscaffold.deployment.site.reading import SiteRecords
from dpscaffold.deployment.site.work import OfferedWork, accepted_names
from dpscaffold.deployment.transports.flower import require
from dpscaffold.deployment.transports.flower.wire import from_records, to_records
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Schema
from dpscaffold.privacy.accounting import spent
from dpscaffold.privacy.numbers import round_up
from dpscaffold.tasks import LOSSES, ModuleTask
from dpscaffold.tasks.fitting import check_task

#: What reads a client's records: a dataset or loader of (x, y) pairs, or two arrays.
Load = Callable[[Context], Any]
Say = Callable[[str], None]
Reply = tuple[dict[str, Json], Vectors]

#: The name of the module in an offer: it is the app's own, and no other can be asked for.
OWN = "dpscaffold.flower:own"
_NODE = "flower-node"
#: Larger labels are not read: their squares are not finite in single precision.
_LARGEST = 1e15
_LOG = logging.getLogger("flwr")


@dataclass(frozen=True)
class OwnModel:
    """A module with its loss and the shape of a row, the same at the server and at the clients.

    >>> OwnModel(nn.Linear(4, 3), (4,)).rows.classes
    3
    """

    module: nn.Module
    shape: tuple[int, ...]
    loss: str = "softmax"

    def __post_init__(self) -> None:
        known = [name for name, loss in LOSSES.items() if loss.kind != "labels"]
        if self.loss not in known:
            raise BadInput(
                "unknown-choice", f"loss is {self.loss!r:.60}; give one of {', '.join(known)}"
            )
        if not self.shape or not all(type(n) is int and n > 0 for n in self.shape):
            raise BadInput(
                "wrong-shape",
                f"shape is {self.shape!r:.60}; give the shape of one x, such as (1, 28, 28)",
            )

    def task(self) -> ModuleTask:
        """What computes clipped gradients."""
        return ModuleTask(self.module, self.shape, loss=LOSSES[self.loss])

    def check(self) -> None:
        """Refuse a module that cannot be trained record by record, whatever a record holds."""
        rows, task = self.rows, self.task()
        columns = tuple(map(str, range(rows.width)))
        check_task(task, Schema(columns, (), rows.target, (), rows.dimension), 0)

    @property
    def rows(self) -> SchemaSettings:
        """What a record looks like."""
        features = math.prod(self.shape)
        if LOSSES[self.loss].kind == "number":
            return SchemaSettings(features=features, classes=0, low=-1.0, high=1.0)
        classes = 2
        if self.loss == "softmax":
            task = self.task()
            classes = task.scores(task.initial(0), torch.zeros(1, features)).shape[1]
        return SchemaSettings(features=features, classes=classes)

    @property
    def settings(self) -> TaskSettings:
        """The task as an offer names it."""
        return TaskSettings(kind="module", module=OWN, shape=self.shape, loss=self.loss)


@dataclass(frozen=True)
class PrivateTraining:
    """A client mod that trains with record-level differential privacy and keeps a ledger.

    Put it into ``ClientApp(mods=[...])``, or call :func:`client_app`. It answers the rounds of
    :class:`Strategy` with the K noised steps of the plan, each participation being in the ledger on
    disk before anything is computed, and refuses everything else, so functions that the app
    registers are never called on the records. ε and δ hold for all runs of one state folder
    together: keep one folder per dataset, and never copy or restore it.

    Args:
        module: The ``nn.Module``, the same as the server's.
        load: Reads the records of this client, given Flower's ``Context``: a map-style dataset of
            (x, y), a ``DataLoader`` of one (only its dataset is used), or a pair of arrays. Each x
            must depend on its own record only. An item that cannot be read, or that has another
            shape, counts as a record and contributes nothing.
        shape: The shape of one x.
        epsilon: The most that this client spends, over all runs.
        delta: δ of all runs together.
        loss: One of ``dpscaffold.tasks.LOSSES``.
        runs: How many runs share ε and δ; each may use an equal part.
        state: The folder of the ledger; by default the node's setting ``state``
            (``--node-config 'state="/var/lib/node"'``).
    """

    module: nn.Module
    load: Load
    shape: tuple[int, ...]
    epsilon: float
    delta: float
    loss: str = "softmax"
    runs: int = 1
    state: str | Path | None = None

    def __post_init__(self) -> None:
        require()
        if not callable(self.load):
            raise BadInput("wrong-type", "load is not a function; give one that reads the records")
        if not 0 < self.epsilon <= 1e6 or self.runs < 1:
            raise BadInput(
                "out-of-range",
                f"epsilon is {self.epsilon} and runs {self.runs}; both must be positive",
            )
        if not SMALLEST_DELTA <= self.delta / self.runs < 1:
            raise BadInput(
                "delta-too-small",
                f"delta/runs is {self.delta / self.runs:g}; it must be from {SMALLEST_DELTA:g} "
                f"to below 1",
            )
        self.model.check()

    @property
    def model(self) -> OwnModel:
        """The module with its loss and shape."""
        return OwnModel(self.module, tuple(self.shape), self.loss)

    @property
    def policy(self) -> Policy:
        """What is granted to any server: ε and δ, single records, noise from this machine."""
        return Policy(
            epsilon=self.epsilon,
            delta=self.delta,
            max_runs=self.runs,
            max_local_steps=1_000_000,
            tasks=(OWN,),
            max_parameters=10**9,
        )

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer one message. ``call_next``, the app's own function, is never called."""
        asked = from_records(message.content)
        if message.metadata.message_type != "train" or not asked.header:
            raise BadInput(
                "not-private",
                f"a message of type {message.metadata.message_type!r:.40} is not a round of "
                f"dpscaffold.flower.Strategy; this client answers nothing else, as no guarantee "
                f"would hold for it",
            )
        say = _log_to(self._folder(context))
        try:
            fields, vectors = self._answered(asked, context, say)
        except Refused as no:
            say(f"refused: {no}")
            fields, vectors = {"status": "no", "reason": no.code}, {}
        except Exception:  # whatever it is, only a code leaves: the text may show a record
            say(f"error: {traceback.format_exc()}")
            fields, vectors = {"status": "no", "reason": "site-error"}, {}
        return Message(content=to_records(SignedMessage(fields, vectors)), reply_to=message)

    def _answered(self, asked: SignedMessage, context: Context, say: Say) -> Reply:
        try:
            state = StateFolder(self._folder(context), _NODE)
        except BadInput as error:
            code = "busy" if error.code == "folder-in-use" else "site-error"
            raise Refused(code, str(error)) from error
        try:
            ledger = SiteLedger(state.ledger, _NODE)
            if ledger.strange(asked.header.get("heads", []), state.head_key):
                raise Refused("ledger-behind", "the server has seen another ledger of this node")
            work = self._work(asked, context, say)
            kind = text_of(asked.header, "kind", "bad-offer")
            answer = {"offer": self._offer, "task": self._task}.get(kind)
            if answer is None:
                raise Refused("version", f"{kind!r:.40}")
            memory = state.run(text_of(asked.header, "run", "unknown-run"))
            fields, vectors = answer(asked, work, memory, ledger)
            say(_sentence(fields, asked.header))
            head = ledger.shown(state.head_key)
            return {**fields, "status": "yes", "ledger": dict(vars(head))}, vectors
        finally:
            state.close()

    def _folder(self, context: Context) -> Path:
        """Where this node's ledger is; in a simulation each node has a part of its own."""
        given = self.state or context.node_config.get("state")
        if not given:
            raise BadInput(
                "missing-argument",
                "the node has no folder for its ledger; start it with --node-config "
                "'state=\"FOLDER\"', or give PrivateTraining(state=…)",
            )
        part = context.node_config.get("partition-id") if self.state else None
        return Path(str(given)) if part is None else Path(str(given)) / str(part)

    def _work(self, asked: SignedMessage, context: Context, say: Say) -> OfferedWork:
        """What is asked for, on this client's records; the policy is looked at first."""
        raw = asked.header.get("offer")
        if not isinstance(raw, dict):
            raise Refused("bad-offer", "it is not a table")
        offer, own, task = accepted_names(raw, self.policy), self.model, self.model.task()
        if (offer.rows, offer.task) != (own.rows, own.settings):
            raise Refused("policy-model", "the server's model has another shape or loss")
        _refuse_unknown(offer)
        held = records_of(self.load(context), own)
        for sentence, _ in held.notes:
            say(sentence)
        work = OfferedWork(
            offer, task, offer.build_algorithm(), held, len(held), False, torch.device("cpu")
        )
        check_terms(self.policy, work.terms)
        try:
            _ = work.batch
        except BadInput as error:
            raise Refused("data-unfit", str(error)) from error
        return work

    def _offer(
        self, asked: SignedMessage, work: OfferedWork, memory: RunMemory, ledger: SiteLedger
    ) -> Reply:
        """Reserve a grant for the run, and say how many records there are. In a run that is known,
        nothing is granted or spent: the answer says what it has cost so far."""
        run, plan = memory.folder.name, digest(work.offer.to_dict())
        if run not in ledger.runs:
            granted = self._granted(work, ledger)
            ledger.reserve(GrantedRun(run, plan, granted, _account(work)))
        if memory.enrolment() is None:
            memory.write_enrolment(
                Enrolment(
                    run=run,
                    plan=plan,
                    offer=work.offer.to_dict(),
                    records=work.records,
                    declared=False,
                    nonce="",
                    server_commitment="",
                    anchor=vars(ledger.anchor),
                )
            )
        entry = self._entry(work, memory, ledger)
        return {"records": work.records, **_spent(work, entry)}, {}

    def _granted(self, work: OfferedWork, ledger: SiteLedger) -> SiteGrant:
        """A grant that fits next to those of runs in which this client took part; others, which
        never began, are taken back."""
        ledger.release(ledger.unused(besides=""))
        left = ledger.left(self.policy)
        return grant(self.policy, work.terms, work.records, work.batch, left)

    def _entry(self, work: OfferedWork, memory: RunMemory, ledger: SiteLedger) -> GrantedRun:
        """The run's grant; it was given for one plan and one number of records."""
        known, entry = enrolment_of(memory), entry_of(memory.folder.name, ledger)
        check_anchors(known, memory.pending(), ledger)
        if entry.plan != digest(work.offer.to_dict()):
            raise Refused("plan-changed", f"the ledger has {entry.plan}")
        if entry.account != _account(work):
            raise Refused("data-changed", f"{work.records} records, not those of the grant")
        return entry

    def _task(
        self, asked: SignedMessage, work: OfferedWork, memory: RunMemory, ledger: SiteLedger
    ) -> Reply:
        """One participation: counted, then computed, then stored; or the same answer again."""
        entry, pending, run = self._entry(work, memory, ledger), memory.pending(), asked.header
        round = whole_of(run, "round", "bad-round", least=1)
        if round > work.plan.rounds:
            raise Refused("bad-round", f"{round} of {work.plan.rounds}")
        restore = check_vectors(asked.vectors, work, round)
        acknowledged = text_of(run, "acknowledged", "state-mismatch")
        nonce = text_of(run, "nonce", "bad-offer")
        slots = memory.settle(acknowledged, restore, pending, nonce).slots
        question = question_of(entry.run, round, acknowledged, asked.digests)
        if pending is None or not memory.has_pending or pending.question != question:
            if entry.participations >= entry.grant.participations:
                raise Refused("budget-spent")
            ledger.participate(entry.run, round)
            pending = _computed(work, round, asked.vectors, slots, question, ledger, entry.run)
            memory.write_pending(pending)
        return self._stated(work, ledger.runs[entry.run], pending)

    def _stated(self, work: OfferedWork, entry: GrantedRun, pending: PendingUpload) -> Reply:
        """The upload with the ε that this run has cost so far."""
        fields: dict[str, Json] = {"upload": pending.upload, "round": pending.round}
        return fields | _spent(work, entry), pending.vectors


def _refuse_unknown(offer: Offer) -> None:
    """Refuse what only sites with a policy of their own know how to do."""
    further = (offer.secure, offer.fit, offer.noises, offer.personal)
    if any(part is not None for part in further):
        raise Refused(
            "policy-secure", "secure sums, preparation, budgets and personal models are unknown"
        )
    if offer.plan.steps_by_user is not None:
        raise Refused("policy-steps", "every client takes the same steps")


def _log_to(folder: Path) -> Say:
    """Writes to Flower's log and to the node's own: a stock node keeps nothing of what its
    ClientApp says."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write = rotating_log(folder / "client.log")

    def say(sentence: str) -> None:
        _LOG.info("%s", sentence)
        write(sentence)

    return say


def _sentence(fields: Mapping[str, Json], asked: Mapping[str, Json]) -> str:
    """What the node's own log says of an answer."""
    granted = f"{_shown(fields['granted'])} at δ = {fields['delta']:g}"
    if not fields["participations"]:
        return f"run {asked['run']} was granted ε = {granted}"
    what = f"round {fields['round']}" if "round" in fields else "offered again"
    return (
        f"run {asked['run']}, {what}: took part {fields['participations']} times, "
        f"ε = {_shown(fields['epsilon'])} of {granted}, against the server and all other clients"
    )


def _shown(epsilon: Json) -> str:
    """ε, rounded up."""
    assert isinstance(epsilon, float)
    return round_up(epsilon, 4)


def _spent(work: OfferedWork, entry: GrantedRun) -> dict[str, Json]:
    """What a run has cost so far, and the most that it may cost."""
    run = work.terms.run(work.records, work.batch, entry.grant.delta)
    return {
        "participations": entry.participations,
        "epsilon": spent(run, entry.participations) if entry.participations else 0.0,
        "granted": entry.grant.epsilon,
        "delta": entry.grant.delta,
    }


def _account(work: OfferedWork) -> dict[str, Any]:
    """What a grant is for; as the ledger reads it back."""
    kept = work.terms.to_dict(work.records, work.batch, work.declared)
    kept["terms"]["unproved"] = list(kept["terms"]["unproved"])
    return kept


def _computed(
    work: OfferedWork,
    round: int,
    vectors: Vectors,
    slots: Vectors,
    question: str,
    ledger: SiteLedger,
    run: str,
) -> PendingUpload:
    """K noised steps with keys from the operating system."""
    received = {k: v for k, v in vectors.items() if not k.startswith("restore.")}
    zero = {name: np.zeros(size, "<f4") for name, size in work.remembers().items()}
    uploaded, kept = work.participate(round, 0, received, {**zero, **slots})
    count = ledger.runs[run].participations
    return PendingUpload(fresh_id(), question, round, count, ledger.anchor, uploaded, kept)


def client_app(training: PrivateTraining) -> ClientApp:
    """A ClientApp that answers with this mod, and has no function of its own."""
    app = ClientApp(mods=[training])

    @app.train()  # type: ignore[untyped-decorator]
    def never(message: Message, context: Context) -> Message:
        raise RuntimeError("PrivateTraining answers every message itself")

    return app


# --- records ---------------------------------------------------------------------------------


def records_of(given: Any, model: OwnModel) -> SiteRecords:
    """All records of a dataset, a loader of one or a pair of arrays.

    What a single record holds never decides whether the data are accepted: one that cannot be read
    stays a record and contributes nothing.
    """
    items = _items(given)
    width, rows = math.prod(model.shape), model.rows
    features, used = torch.zeros(len(items), width), torch.zeros(len(items), dtype=torch.bool)
    labels = torch.zeros(len(items), dtype=torch.long if rows.classes else torch.float32)
    for place in range(len(items)):
        read = _record(items, place, model.shape, rows.class_count)
        if read is not None:
            features[place], labels[place], used[place] = read[0], read[1], True
    lost = len(items) - int(used.sum())
    note = f"{lost} of {len(items)} records cannot be read and contribute nothing"
    return SiteRecords(features, labels, used, ((note, False),) if lost else ())


def _items(given: Any) -> Any:
    """Something with a length and items (x, y), each record being in it once."""
    if isinstance(given, DataLoader):
        if given.collate_fn is not default_collate:
            raise Refused(
                "data-unfit", "the loader has a collate_fn, which may mix records; give its dataset"
            )
        given = given.dataset
    if isinstance(given, IterableDataset) or not hasattr(given, "__len__"):
        raise Refused("data-unfit", "load gives no dataset with a length")
    if isinstance(given, tuple) and len(given) == 2 and hasattr(given[0], "shape"):
        features, labels = given
        if len(features) != len(labels):
            raise Refused("data-unfit", f"{len(features)} rows and {len(labels)} labels")
        return list(zip(features, labels, strict=True))
    return given


def _record(
    items: Sequence[Any], place: int, shape: tuple[int, ...], classes: int
) -> tuple[Tensor, float | int] | None:
    """A record's features (D,) and label; None where it cannot be read."""
    try:
        x, y = items[place]
        row = torch.as_tensor(np.asarray(x), dtype=torch.float32)
        label = float(y)
    except Exception:  # the dataset's own code, on whatever the record holds
        return None
    in_range = label.is_integer() and 0 <= label < classes if classes else abs(label) < _LARGEST
    if row.shape != torch.Size(shape) or not bool(torch.isfinite(row).all()) or not in_range:
        return None
    return row.reshape(-1), int(label) if classes else label
