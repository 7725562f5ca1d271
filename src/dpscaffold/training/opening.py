"""How a run begins, or goes on where its folder stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dpscaffold.errors import BadInput
from dpscaffold.federation.tables import Digest
from dpscaffold.privacy.seeds import Seed
from dpscaffold.runs.account import AnyAccount, account_of
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.secret import Secret, fresh_key, open_key
from dpscaffold.runs.written import to_toml
from dpscaffold.training.asked import Asked
from dpscaffold.training.training import pick_up

#: What a run folder's config.toml says where nobody gave the step size.
CHOSEN = "# plan.learning_rate was chosen from public numbers: sizes, plan and noise.\n"


@dataclass(frozen=True)
class Begun:
    """A run whose folder is claimed and whose ledger is open: what it draws from, and where it
    goes on."""

    account: AnyAccount
    seed: Seed
    folder: RunFolder | None = None
    saved: Checkpoint | None = None
    history: Sequence[HistoryRow] = ()


@contextmanager
def begun(asked: Asked) -> Iterator[Begun]:
    """Claim the run's folder, or pick up the run that it holds; other processes are kept out until
    the end."""
    account = account_of(asked.run)
    if asked.out is None:
        account.check_room()
        account.begin()
        yield Begun(account, asked.run.seed())
        return
    folder, digest = RunFolder(asked.out), asked.federation.digest()
    open_ = _reopened if asked.resume and folder.holds_run else _opened
    try:
        yield open_(asked, account, folder, digest)
    finally:
        folder.release()


def _opened(asked: Asked, account: AnyAccount, folder: RunFolder, digest: Digest) -> Begun:
    """Claim a folder for a new run."""
    account.check_room()
    folder.check_free()
    key = fresh_key() if asked.data_key is None else open_key(asked.data_key)
    seed = asked.run.seed()
    secret = Secret(key, None if account.run is None else seed)
    known = _identity(asked, secret, digest)
    chosen = CHOSEN if asked.run.plan.learning_rate is None else ""
    folder.begin(chosen + to_toml(asked.tables), known, secret)
    account.attach(folder, known.data, seed)
    return Begun(account, seed, folder)


def _reopened(asked: Asked, account: AnyAccount, folder: RunFolder, digest: Digest) -> Begun:
    """Continue the run of a folder, if it is the same run."""
    folder.lock()
    secret = folder.secret(private=account.run is not None)
    if asked.data_key is not None and not secret.is_of(asked.data_key):
        raise BadInput(
            "data-key-changed",
            f"--data-key is {asked.data_key}, and the run in {folder.path} began with another key; "
            f"leave it out to resume",
        )
    known = _identity(asked, secret, digest)
    folder.check_same(known, asked.tables)
    seed = secret.seed or asked.run.seed()
    saved, history = pick_up(folder, account, known.data, seed)
    if folder.plan["rounds"] != asked.run.plan.rounds:
        folder.replan(to_toml(asked.tables), known)
    return Begun(account, seed, folder, saved, history)


def _identity(asked: Asked, secret: Secret, digest: Digest) -> Identity:
    """What the run is, on these records."""
    data = secret.identity(digest.value)
    return Identity(asked.run.to_dict(), asked.engine, data, digest.covers, asked.home)
