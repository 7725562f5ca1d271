"""Combine the files of all sites: check them, add them up, and solve for the model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tomli_w

from dpscaffold import __version__
from dpscaffold.atomic import draft_of, put_in_place
from dpscaffold.errors import BadInput
from dpscaffold.models.model import Model
from dpscaffold.models.trained import Origin
from dpscaffold.privacy.page import Statement
from dpscaffold.privacy.seeds import Seed
from dpscaffold.runs.account import PrivacyAccount
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.ledger import WITHIN
from dpscaffold.runs.summary import Summary
from dpscaffold.sums.files import SumFile, read_sums
from dpscaffold.sums.plan import SumsPlan


@dataclass(frozen=True)
class Combined:
    """A model of several sites' sums, its statement, and the records that it is of, by the noised
    sums themselves."""

    model: Model
    privacy: Statement
    records: float


def combine(plan: SumsPlan, paths: Sequence[Path]) -> Combined:
    """The model of the files of all members of the plan."""
    files = [read_sums(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        check_file(plan, path, file)
    names = [file.site for file in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(
            "combined-twice", f"the sums of {twice!r} are given twice; give one file of each site"
        )
    missing = [name for name in plan.members if name not in names]
    if missing:
        what = "a masked total needs all of them" if plan.masked else "the plan names it"
        raise BadInput(
            "bad-members", f"the file of {missing[0]!r} is missing, and {what}; add its file"
        )
    if len({file.session for file in files}) > 1 or len({file.public for file in files}) < len(
        files
    ):
        raise BadInput(
            "other-federation",
            "the files are of different sessions, or one key signed two of them; let all sites "
            "make theirs with the same key files",
        )
    total = np.zeros(plan.task.parameters, np.uint64)
    for file in files:
        total += file.words
    return _solved(plan, total)


def check_file(plan: SumsPlan, path: Path, file: SumFile) -> None:
    """Refuse a file that is not of this plan."""
    if file.version != __version__:
        raise BadInput(
            "version-differs",
            f"{path} was made by dpscaffold {file.version!r:.40}, and this is {__version__}; use "
            f"one version at all sites",
        )
    if file.plan != plan.digest or file.masked != plan.masked:
        raise BadInput(
            "other-federation",
            f"{path} was made with another plan: another federation, or changed parameters; make "
            f"it again with this plan",
        )
    if file.site not in plan.members:
        raise BadInput(
            "bad-members",
            f"{path} is of {file.site!r:.80}, who is not among the plan's members "
            f"({', '.join(plan.members)})",
        )
    if len(file.words) != plan.task.parameters:
        raise BadInput(
            "wrong-shape",
            f"{path} has {len(file.words)} numbers, and the plan's sums have "
            f"{plan.task.parameters}; ask {file.site!r} for it again",
        )


def _solved(plan: SumsPlan, total: np.ndarray) -> Combined:
    setting, rows, grid = plan.setting, plan.offer.rows, plan.grid
    integers = grid.integers(total.astype(grid.dtype))
    mean = grid.restore(integers, float(len(plan.members)))
    gram, _ = plan.task.matrices(mean)
    account = PrivacyAccount(setting)
    _count(plan, account)
    said = account.statement()
    task, params = plan.task.trained(mean)
    schema = setting.roster.schema
    steps = (rows.coding, *schema.preparation)
    origin = Origin(setting.label, setting.roster.title, 1, rows.label)
    model = Model(task, params, steps, schema.target, schema, said, origin)
    return Combined(model, said, 2 * float(gram[-1, -1]) * len(plan.members))


def _count(plan: SumsPlan, account: PrivacyAccount) -> None:
    """Enter all attempts: whoever has the files of this one may have those of the ones before."""
    everybody = np.arange(len(plan.members))
    account.admit(1, everybody)
    for _ in range(plan.sums.attempt - 1):
        account.count_again(1, everybody.tolist())


def write_run(plan: SumsPlan, made: Combined, folder: Path) -> Statement:
    """A run folder that predict, evaluate, export, privacy and report read; returns the statement
    of its ledger. It has its name when it is whole."""
    if folder.exists() and any(folder.iterdir()):
        raise BadInput("folder-not-empty", f"--out is {folder}, which is not empty; name a new one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(folder)
    run, account = RunFolder(draft), PrivacyAccount(plan.setting)
    run.write_text("config.toml", tomli_w.dumps(plan.to_dict()))
    seed = Seed("sites", secrets.randbits(128))  # of no use: nobody is drawn
    account.attach(run, plan.digest, seed)
    _count(plan, account)
    said = account.statement()
    run.append_metrics(HistoryRow(1, {"arrived": float(len(plan.members))}))
    replace(made.model, privacy=said).save(draft / WITHIN)
    title = plan.setting.roster.title
    run.write_summary(
        Summary(algorithm=plan.setting.label, data=title, ended="completed", rounds=1)
    )
    put_in_place(draft, folder)
    return said
