"""A deployed federation inside one process: real sites with real files, messages in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_memory import InMemory
from small import CPU, PLAN, Trial, federation

from dpscaffold.algorithms import ALGORITHMS
from dpscaffold.config import AlgorithmSettings, TaskSettings
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.personal import PersonalSettings, trained_by
from dpscaffold.deployment.protocol.agreement import SchemaSettings, offer_of
from dpscaffold.deployment.protocol.enrolment import (
    EnrolledRun,
    SignedExchange,
    begin_with,
    offer_to,
    tell_draw,
)
from dpscaffold.deployment.protocol.messages import (
    SignedMessage,
    ask,
    new_key,
    pack,
    public_of,
    unpack,
)
from dpscaffold.deployment.provision import FederationFile, provision, read_invitation
from dpscaffold.deployment.server.sites import Patience, Sites
from dpscaffold.deployment.site.answer import Site
from dpscaffold.deployment.site.begin import make_site
from dpscaffold.deployment.site.file import Policy, SiteFile
from dpscaffold.deployment.site.ledger import SiteLedger
from dpscaffold.deployment.site.memory import RunMemory, StateFolder
from dpscaffold.deployment.site.work import opener
from dpscaffold.engine import Draw, Round, State
from dpscaffold.engine.server import server_round
from dpscaffold.federation import Federation
from dpscaffold.models.loading import load_model
from dpscaffold.models.model import Model
from dpscaffold.privacy.accounting import spent
from dpscaffold.randomness.streams import Randomness

NAMES = ("east", "north", "south", "west", "inland", "coast")

#: Generous: what a test is about, it restricts.
LOOSE = {
    "epsilon": 1e6,
    "delta": 1e-2,
    "max_runs": 10,
    "units": ("record", "user", "none"),
    "algorithms": tuple(ALGORITHMS),
}

#: How a table of people is read by an offer.
TABLE = SchemaSettings(
    features=("age", "sex", "bmi"),
    categories={"sex": ("f", "m")},
    label="ill",
    classes=("no", "yes"),
    missing=-1.0,
)

#: The plan and the privacy of an offer that a new site accepts; a test adds the schema.
OFFERED = """
[plan]
learning_rate = 0.5
rounds = 5
local_steps = 4
user_ratio = 1.0
[privacy]
noise = 20.0
"""


def new_site(folder: Path, *words: Any) -> Path:
    """The ``site.toml`` of the only site of a new federation; ``words`` as in ``make_site``."""
    (invitation,) = provision(FederationFile("127.0.0.1:1", ("north",)), folder / "fed")
    make_site(read_invitation(invitation), folder / "north", *words)
    return folder / "north" / "site.toml"


class World:
    """Sites a, b, … that hold the users of a small federation, and their server."""

    def __init__(
        self,
        folder: Path,
        algorithm: dict[str, object] | str = "scaffold",
        task: str = "logistic",
        privacy: Gaussian | None = None,
        data: Federation | None = None,
        policy: dict[str, object] | None = None,
        personal: PersonalSettings | None = None,
        **plan: object,
    ) -> None:
        self.folder, self.personal = folder, personal
        self.data = data if data is not None else federation((9, 12, 7))
        self.names = NAMES[: self.data.users]
        named = {"name": algorithm} if isinstance(algorithm, str) else algorithm
        self.algorithm = AlgorithmSettings.model_validate(named)
        self.learns = TaskSettings(kind=task, hidden=6)
        target = self.data.schema.target
        self.rows = SchemaSettings(
            features=self.data.dimension,
            classes=self.data.classes,
            low=target.low,
            high=target.high,
        )
        self.setting = Trial.of(
            self.data,
            self.learns.build(self.data),
            trained_by(self.algorithm.build(), personal),
            PLAN.changed(**{"user_ratio": 0.7, **plan}),
            privacy,
        )
        self.key = new_key()
        self.policies = {name: Policy.model_validate(LOOSE | (policy or {})) for name in self.names}
        self.logs: dict[str, list[str]] = {name: [] for name in self.names}
        self.steps: Callable[[str, str], None] = lambda name, step: None
        self.keys = {name: new_key() for name in self.names}
        self.sites: dict[str, Site] = {}
        for user, name in enumerate(self.names):
            (folder / name).mkdir(parents=True)
            self.write_data(name, user)
            self.open(name)
        self.exchange = InMemory({name: self.answering(name) for name in self.names})
        self.exchange.restart = self.restart
        self.saved: dict[str, object] = {}
        self.fresh_server()

    # --- sites

    def write_data(self, name: str, user: int, rows: slice = slice(None)) -> None:
        """A user's records as the site's file."""
        features, labels = self.data.train.of(user)
        np.savez(
            self.folder / name / "data.npz",
            features=features.numpy()[rows],
            labels=labels.numpy()[rows],
        )

    def file(self, name: str) -> SiteFile:
        """What ``site.toml`` would say. Sizes are declared where batches are Poisson."""
        declares = self.setting.sampling == "poisson"
        size = self.data.roster.sizes[self.names.index(name)]
        return SiteFile(
            name=name,
            server="127.0.0.1:1",
            coordinator=public_of(self.key),
            records=size if declares else None,
            data={"source": "npz", "path": "data.npz"},
            policy=self.policies[name],
        )

    def open(self, name: str, state: Path | None = None) -> Site:
        """Start a site's process."""
        folder = StateFolder(state or self.folder / name / "state", name)
        log = self.logs[name].append
        site = Site(
            name,
            public_of(self.key),
            self.keys[name],
            folder,
            lambda: self.policies[name],
            opener(self.file(name), self.folder / name, CPU, log),
            log=log,
            step=lambda step: self.steps(name, step),
        )
        self.sites[name] = site
        return site

    def close(self, name: str) -> None:
        """End a site's process."""
        self.sites[name].state.close()

    def restart(self, name: str) -> Callable[[SignedMessage], SignedMessage]:
        """A process that died, started again from its disk."""
        self.close(name)
        self.open(name)
        return self.answering(name)

    def answering(self, name: str) -> Callable[[SignedMessage], SignedMessage]:
        return lambda message: self.sites[name].answer(message)

    def ledger(self, name: str) -> SiteLedger:
        return SiteLedger(self.folder / name / "state" / "ledger.jsonl", name)

    def memory(self, name: str) -> RunMemory:
        return self.sites[name].state.run(self.enrolled.run)

    def model(self, name: str) -> Model:
        """The model that the site keeps of the only run that is over."""
        kept = (self.folder / name / "state" / "models").iterdir()
        (folder,) = [path for path in kept if not path.name.endswith("-own")]
        return load_model(folder)

    def count(self, name: str) -> int:
        """How often the site has reserved a participation in the run."""
        return self.ledger(name).runs[self.enrolled.run].participations

    def cost(self, name: str, count: int, run: str | None = None) -> float:
        """ε of so many participations of the site in a run, by default in the present one."""
        entry = self.ledger(name).runs[run or self.enrolled.run]
        work = self.sites[name]._works[entry.run]
        described = work.terms.run(work.records, work.batch, entry.grant.delta, work.declared)
        return spent(described, count) * (1 + 1e-9)

    # --- the server

    def fresh_server(self) -> None:
        given = (self.rows, self.learns, self.algorithm, self.setting.plan, self.setting.privacy)
        offer = offer_of(*given, sites=self.names, personal=self.personal)
        self.enrolled = EnrolledRun.fresh(offer.to_dict(), self.names)
        self.post = self.correspondence()
        self.engine: Sites | None = None
        self.state = State.initial(self.setting, CPU)

    def correspondence(self) -> SignedExchange:
        publics = {name: public_of(key) for name, key in self.keys.items()}
        return SignedExchange(self.exchange, self.key, publics)

    def enrol(self) -> Sites:
        """From the offer to the draw."""
        self.enrolled = offer_to(self.post, self.enrolled)
        self.enrolled = begin_with(self.post, self.enrolled)
        tell_draw(self.post, self.enrolled, self.names)
        return self.server()

    def server(self) -> Sites:
        patience = Patience(quorum=1, voids=3, pause=0.0)
        self.engine = Sites(
            self.setting, self.enrolled, self.post, patience, sleep=lambda seconds: None
        )
        self.checkpoint()
        return self.engine

    def checkpoint(self) -> None:
        assert self.engine is not None
        self.saved = copy.deepcopy({"state": self.state, "sites": self.engine.to_dict()})
        self.engine.saved()

    def resume(self) -> Sites:
        """A server that died, started again from its checkpoint."""
        self.post = self.correspondence()
        saved = copy.deepcopy(self.saved)
        self.engine = Sites(
            self.setting,
            self.enrolled,
            self.post,
            Patience(quorum=1, voids=3, pause=0.0),
            sleep=lambda seconds: None,
        )
        self.engine.restore(saved["sites"])
        self.state = saved["state"]
        return self.engine

    @property
    def secret(self) -> bool:
        return self.setting.privacy is not None and self.setting.privacy.secret

    def draw(self, number: int) -> Draw:
        """Who takes part: from the joint seed, or in a rehearsal from the plan's."""
        streams = Randomness(self.enrolled.seed if self.secret else self.setting.plan.public_seed)
        drawn = streams.cohort(number, self.setting.users, self.setting.cohort_size)
        return Draw(drawn, drawn)

    def round(self, save: bool = True) -> Round:
        """The next round, and its checkpoint."""
        assert self.engine is not None
        draw, engine = self.draw(self.state.round + 1), self.engine
        done = server_round(self.setting, self.state, draw, engine.memories, engine.gather)
        self.state = done.state
        if save:
            self.checkpoint()
        return done

    def drive(self, until: int | None = None) -> World:
        """The rounds that are left, or up to one."""
        while self.state.round < (until or self.setting.plan.rounds):
            self.round()
        return self

    # --- messages by hand

    def task(self, name: str, number: int = 1, vectors=None, **fields) -> SignedMessage:
        """A task as the server would send it, with anything in it changed."""
        x = {k: v.numpy() for k, v in self.state.server.slots.items()}
        sent = {"params": self.state.params.numpy()}
        sent |= {f"shared.{k}": v for k, v in x.items()}
        head = {
            "plan": self.enrolled.plan,
            "round": number,
            "acknowledged": self.engine.acknowledged.get(name, "") if self.engine else "",
            "seen": 0,
            "seen_total": 0,
        }
        sent = {k: v for k, v in (sent | (vectors or {})).items() if v is not None}
        return ask("task", self.enrolled.run, name, head | fields, sent, self.key)

    def send(self, name: str, message: SignedMessage) -> SignedMessage:
        return self.sites[name].answer(message)

    def reason(self, name: str, message: SignedMessage) -> str:
        """The code of a refusal, or the empty text."""
        return str(self.send(name, message).header.get("reason", ""))

    def drawn_name(self, number: int = 1) -> str:
        """A site that the round drew."""
        return self.names[int(self.draw(number).drawn[0])]

    def gap(self) -> float:
        """M·c − Σc_i over the sites' own disks, the largest entry."""
        worst = 0.0
        for slot, c in self.state.server.slots.items():
            total = np.zeros(len(c))
            for name in self.names:
                memory, last = self.memory(name), self.engine.acknowledged.get(name, "")
                held = memory.settle(last, None, memory.pending()).slots
                if slot in held:
                    total += held[slot]
            worst = max(worst, float(np.abs(len(self.names) * c.numpy() - total).max()))
        return worst


def largest_gap(slots: Mapping[str, torch.Tensor], memories: Iterable[RunMemory]) -> float:
    """The largest entry of M·c − Σc_i after a run, from what the sites have on their disks."""
    held = [memory.acknowledged().slots for memory in memories]
    worst = 0.0
    for name, c in slots.items():
        total = sum(one[name].astype(np.float64) for one in held if name in one)
        worst = max(worst, float(np.abs(len(held) * c.numpy() - total).max()))
    return worst


def memories_of(*states: Path) -> list[RunMemory]:
    """The memory of the run that is over, in each of these state folders."""
    found = [RunMemory(run) for state in states for run in sorted((state / "runs").iterdir())]
    return [memory for memory in found if (known := memory.enrolment()) and known.over]


def uploads_of(answers: list[tuple[str, bytes]]) -> set[tuple[str, str]]:
    """The distinct uploads (site, id) that left."""
    found = set()
    for name, raw in answers:
        message = unpack(raw)
        assert message is not None
        if message.header["kind"] == "task" and message.header["status"] == "yes":
            found.add((name, str(message.header["upload"])))
    return found


def same_bytes(one: SignedMessage, other: SignedMessage) -> bool:
    """Whether two answers carry the same vectors, byte for byte."""
    return pack(SignedMessage({}, one.vectors)) == pack(SignedMessage({}, other.vectors))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b)


def sent_in(world: World) -> dict[str, dict[str, Any]]:
    """The vectors of the last upload of every site, by its name."""
    return {name: unpack(raw).vectors for name, raw in world.exchange.answered}
