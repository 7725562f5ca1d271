"""How a run begins, or goes on where its folder stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dpscaffold.errors import BadInput
from dpscaffold.privacy.seeds import Seed
from dpscaffold.runs.account import PrivacyAccount
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.data_key import fresh_key, identity, open_key
from dpscaffold.runs.folder import Identity, RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.log import RunLog
from dpscaffold.runs.written import to_toml
from dpscaffold.training.asked import Asked
from dpscaffold.training.training import pick_up

#: What a run folder's config.toml says where nobody gave the step size.
CHOSEN = "# plan.learning_rate was chosen from public numbers: sizes, plan and noise.\n"


@dataclass(frozen=True)
class Begun:
    """A run whose folder is claimed and whose ledger is open: what it draws from, and where it
    goes on."""

    account: PrivacyAccount
    seed: Seed
    folder: RunFolder | None = None
    saved: Checkpoint | None = None
    history: Sequence[HistoryRow] = ()


@contextmanager
def begun(asked: Asked) -> Iterator[Begun]:
    """Claim the run's folder, or pick up the run that it holds; other processes are kept out until
    the end."""
    account = PrivacyAccount(asked.run)
    if asked.out is None:
        _refuse_without_folder(asked)
        account.check_room()
        account.reserve()
        yield Begun(account, asked.run.seed())
        return
    _refuse_claims(asked)
    folder, digest = RunFolder(asked.out), asked.federation.digest()
    known = Identity("", digest.covers, asked.engine, asked.home)
    open_ = _reopened if asked.resume and folder.holds_run else _opened
    try:
        found = open_(asked, account, folder, digest.value, known)
        log = RunLog(folder.path)
        try:
            if slower := getattr(asked.run.task, "slower", ""):
                log.note(slower)  # the module was looked at when the run was made
            yield found
        finally:
            log.close()
    finally:
        folder.release()


def _opened(
    asked: Asked, account: PrivacyAccount, folder: RunFolder, digest: str, known: Identity
) -> Begun:
    """Claim a folder for a new run."""
    account.check_room()
    folder.check_free()
    key = fresh_key() if asked.data_key is None else open_key(asked.data_key)
    known = replace(known, data=identity(key, digest))
    seed = asked.run.seed()
    kept = None if account.run is None else seed
    chosen = CHOSEN if asked.run.plan.learning_rate is None else ""
    folder.begin(chosen + to_toml(asked.tables), known, asked.run.to_dict(), key, kept)
    account.attach(folder, known.data, seed)
    return Begun(account, seed, folder)


def _reopened(
    asked: Asked, account: PrivacyAccount, folder: RunFolder, digest: str, known: Identity
) -> Begun:
    """Continue the run of a folder, if it is the same run."""
    folder.lock()
    stated, longer = asked.run.to_dict(), folder.is_outgrown(asked.run.plan)
    folder.check_same(asked.tables, longer)
    folder.check_setting(stated, longer)
    known = replace(known, data=identity(folder.data_key(asked.data_key), digest))
    folder.check_identity(known)
    seed = asked.run.seed() if account.run is None else folder.kept_seed()
    saved, history = pick_up(folder, account, known.data, seed)
    account.extend(folder)
    if longer:
        folder.replan(to_toml(asked.tables), stated)
    return Begun(account, seed, folder, saved, history)


def _refuse_without_folder(asked: Asked) -> None:
    if asked.resume:
        raise BadInput(
            "no-run-folder",
            "resume is asked for without a run folder; name it with out (--out)",
        )
    if asked.data_key is not None:
        raise BadInput(
            "no-run-folder",
            f"data_key is {asked.data_key} without a run folder, and nothing of the run is "
            f"stored to be compared; name a folder with out",
        )


def _refuse_claims(asked: Asked) -> None:
    """The configuration of a folder must not claim more than the run does."""
    said, privacy = dict(asked.tables.get("privacy") or {}), asked.run.privacy
    claims = {
        "secret": bool(said.get("secret")) and not asked.run.secret,
        "release": bool(said.get("release")) and (privacy is None or privacy.allowed is None),
    }
    for name in [name for name, false in claims.items() if false]:
        raise BadInput(
            "configuration-not-kept",
            f"config says privacy.{name} = true, and the run does not keep it; give "
            f"{'release=True' if name == 'release' else 'Gaussian(secret=True)'}, or leave it "
            f"out of config",
        )
