"""A deployed federation with secure sums inside one process, and a hostile server's hands in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from deploy.world import NAMES, World
from small import CPU, federation

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.secure import Secure
from dpscaffold.deployment.protocol.agreement import offer_of
from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.protocol.masks import SignedKey, from_vector
from dpscaffold.deployment.protocol.messages import ask, fingerprint, public_of
from dpscaffold.deployment.protocol.sums import SUM, Attempt
from dpscaffold.deployment.server.secure import SecureSites
from dpscaffold.deployment.server.sites import Patience
from dpscaffold.deployment.site.file import SecurePolicy
from dpscaffold.engine import State
from dpscaffold.runs.folder import RunFolder

SEEDED = Gaussian(clip=0.7, noise=0.8, sampling="poisson")
SECRET = SEEDED.changed(noise=20.0, secret=True)


class SumWorld(World):
    """Four sites (by default) that confirmed each other, and a run with secure sums."""

    def __init__(self, folder, privacy=SEEDED, secure=None, sizes=(9, 12, 7, 10), **given):
        self.secure = secure or Secure(colluders=1, least=3, voids=10)
        self.confirmed = given.pop("site", {})
        algorithm = given.pop("algorithm", "fedavg")
        plan = {"user_ratio": 1.0, "local_steps": 1, "rounds": 3, **given}
        plan.setdefault("data", None)
        plan["data"] = federation(sizes) if plan["data"] is None else plan["data"]
        super().__init__(folder, algorithm, privacy=privacy, **plan)
        self.confirm()

    def confirm(self, *names, **changes):
        """The people of every site (or of these) write everybody's fingerprint into their
        ``site.toml``."""
        prints = {name: fingerprint(public_of(key)) for name, key in self.keys.items()}
        table = {"least": 3, "colluders": 1, "voids": 10, "epsilon_alone": 1e6, "members": prints}
        secure = SecurePolicy.model_validate({**table, **self.confirmed, **changes})
        for name in names or self.names:
            self.policies[name] = self.policies[name].with_secure(secure)

    # --- the server

    @property
    def sizes(self):
        return dict(zip(self.names, self.data.roster.sizes, strict=True))

    def fresh_server(self):
        self.setting = setting = replace(self.setting, secure=self.secure)
        offer = offer_of(
            self.rows,
            self.learns,
            self.algorithm,
            setting.plan,
            setting.privacy,
            self.secure,
            self.names,
        )
        self.enrolled = EnrolledRun.fresh(offer.to_dict(), self.names, self.sizes)
        self.post = self.correspondence()
        self.engine = None
        self.state = State.initial(self.setting, CPU)

    def server(self):
        self.engine = self._sites()
        self.checkpoint()
        return self.engine

    def _sites(self):
        patience = Patience(quorum=1, voids=5, pause=0.0)
        folder = RunFolder(self.folder / "run")
        folder.path.mkdir(exist_ok=True)
        given = (self.setting, self.enrolled, self.post, patience, lambda seconds: None)
        return SecureSites(*given, folder)

    def resume(self):
        self.post = self.correspondence()
        self.engine = self._sites()
        self.engine.restore(self.saved["sites"])
        self.state = self.saved["state"]
        self.engine.take_up(self.state.round)
        return self.engine

    # --- a hostile server's questions, one site at a time

    def key_of(self, name) -> SignedKey:
        """A site's signed key, as it gives it to the server."""
        head = {"plan": self.enrolled.plan, "seen": 0, "seen_total": 0}
        answer = self.send(name, ask("key", self.enrolled.run, name, head, {}, self.key))
        return SignedKey.read(answer.header["key"])

    def keys_of(self, names=None) -> tuple[SignedKey, ...]:
        return tuple(self.key_of(name) for name in names or self.names)

    def sum_task(self, name, listed, attempt=1, number=1, **changes):
        """A task of a secure sum with anything in it changed."""
        fields = Attempt(attempt, tuple(listed)).identity
        return self.task(name, number, **{**fields, **changes})

    def words(self, name, listed, attempt=1, number=1, **changes) -> np.ndarray:
        """The integers that a site uploads."""
        answer = self.send(name, self.sum_task(name, listed, attempt, number, **changes))
        assert answer.header["status"] == "yes", answer.header
        return from_vector(answer.vectors[SUM], self.engine.sums.grid.bits)

    def no(self, name, listed, attempt=1, number=1, **changes) -> str:
        """The reason for which a site refuses, having reserved nothing."""
        before = self.count(name)
        said = self.reason(name, self.sum_task(name, listed, attempt, number, **changes))
        assert self.count(name) == before
        return said

    def total(self, words) -> np.ndarray:
        """The sum of uploads modulo 2^w, as signed integers."""
        added = np.sum(np.stack(list(words)), axis=0, dtype=self.engine.sums.grid.dtype)
        return self.engine.sums.grid.integers(added).numpy()


__all__ = ["NAMES", "SECRET", "SEEDED", "SumWorld"]
