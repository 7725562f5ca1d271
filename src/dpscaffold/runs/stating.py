"""What plans and runs guarantee, from their files: one statement, of a configuration, of a run
folder, or of several runs over the same records."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpscaffold.errors import BadInput
from dpscaffold.privacy import Facts, Part, Statement
from dpscaffold.privacy import state as state_parts
from dpscaffold.privacy.mechanism import check_delta
from dpscaffold.runs.earlier import refuse_old
from dpscaffold.runs.ledger import HEAD, JOURNAL, WITHIN, Account, read_account, read_statement


@dataclass(frozen=True)
class Subject:
    """What a statement is about: the parts of a plan or of a run, and what else is true of it."""

    name: str
    parts: tuple[Part, ...]
    facts: Facts
    account: Account | None = None


def state(
    *sources: Path | str,
    delta: float | None = None,
    fixed_in_advance: bool = False,
    same_records: bool = False,
) -> Statement:
    """The privacy statement of a configuration, a run folder or a model folder; several runs are
    added up.

    Args:
        sources: Paths. Several must be run folders, over the same records.
        delta: δ, which several runs share evenly; by default each has its own.
        fixed_in_advance: Whether no plan was made after seeing a result of another run.
        same_records: Whether runs whose records cannot be compared are all on the same records.
    """
    paths = [Path(one) for one in sources]
    if len(paths) == 1 and (said := of_model(paths[0])):
        return said
    each = None if delta is None else delta / max(1, len(paths))
    return together([subject_of(one, each) for one in paths], fixed_in_advance, same_records)


def subject_of(source: Path, delta: float | None = None) -> Subject:
    """What a run folder or a configuration says."""
    return _of_run(source, delta) if source.is_dir() else _of_configuration(source, delta)


def of_model(folder: Path) -> Statement | None:
    """The statement in the folder of a model, or of a run without privacy; None where a ledger
    says more, or there is none."""
    refuse_old(folder)
    if any((folder / name).exists() for name in (JOURNAL, HEAD)):
        return None
    return read_statement(folder) or read_statement(folder / WITHIN)


def _of_run(folder: Path, delta: float | None) -> Subject:
    """A run folder: its ledger holds the description of the run, so nothing else is needed."""
    account = read_account(folder)
    parts = account.parts
    if delta is not None:
        check_delta("delta", delta)
        parts = [_at_delta(part, delta / len(parts)) for part in parts]
    return Subject(str(folder), tuple(parts), account.facts, account)


def _at_delta(part: Part, delta: float) -> Part:
    """The same part at another δ."""
    run, ledger = replace(part.run, delta=delta), part.ledger and part.ledger.at_delta(delta)
    return replace(part, run=run, ledger=ledger)


def _of_configuration(path: Path, delta: float | None) -> Subject:
    """A configuration: the run it would make on its data."""
    from dpscaffold.config import load
    from dpscaffold.data.loading import load_federation
    from dpscaffold.runs.account import PrivacyAccount, account_of

    if not path.exists():
        raise BadInput(
            "file-not-found",
            f"{path} does not exist; give a configuration (TOML), a run folder, or numbers",
        )
    settings = load(path)
    federation = load_federation(settings.data)
    setting = settings.setting(federation)
    made = account_of(setting)
    if not isinstance(made, PrivacyAccount):
        return Subject(str(path), (), Facts(preparation=federation.preparation))
    opening, drawn = made.account.opening, setting.seed().drawn
    run = opening.run if delta is None else replace(opening.run, delta=delta)
    facts = replace(made.account.facts, held="plan", draw_given=drawn.given)
    name, costs = str(path), opening.costs
    part = Part(run, run.rounds, None, costs, name, setting.secret, drawn, source=name)
    return Subject(name, (part,), facts)


def together(
    subjects: Sequence[Subject], fixed_in_advance: bool = False, same_records: bool = False
) -> Statement:
    """One statement of subjects over the same records. As many participants collude in all of them
    as the run with the most takes into account."""
    if len(subjects) == 1:
        return state_parts(subjects[0].parts, subjects[0].facts)
    _refuse_copies(subjects)
    known = identities(subjects)
    data = {} if same_records else known
    if same_records and not known:
        raise BadInput(
            "not-applicable",
            "--same-records is given, but these records are not compared and count as the same "
            "anyway; leave it out",
        )
    for one in subjects:
        if not one.parts:
            raise BadInput(
                "no-privacy",
                f"{one.name} is a run without privacy, so nothing adds up; leave it out",
            )
        if len(one.parts) > 1 and fixed_in_advance:
            raise BadInput(
                "rounds-extended",
                f"--fixed-in-advance is given, and {one.name} was given more rounds after it was "
                f"planned, or continues another run; leave the option out, and its parts add",
            )
    # Parts of one folder are of one run; a copy of it that went on has the same draws and noise.
    parts = [
        replace(part, data=data.get(one.name), source=one.name)
        for one in subjects
        for part in one.parts
    ]
    every = [one.facts for one in subjects]
    held = {facts.held for facts in every}
    facts = Facts(
        held=held.pop() if len(held) == 1 else "one computer",
        seeded=any(facts.seeded for facts in every),
        draw_given=any(facts.draw_given for facts in every),
        preparation=tuple(step for facts in every for step in facts.preparation),
        colluders=max(facts.colluders for facts in every),
        fixed_in_advance=fixed_in_advance,
    )
    return state_parts(parts, facts)


def _refuse_copies(subjects: Sequence[Subject]) -> None:
    """Refuse a folder that is named twice, and a copy of another one as it was earlier."""
    places = [Path(one.name).resolve() for one in subjects]
    for k, one in enumerate(subjects):
        if places[k] in places[:k]:
            raise BadInput("run-named-twice", f"{one.name} is given twice; a run is counted once")
    for one, other in itertools.permutations(subjects, 2):
        if one.account is None or other.account is None:
            continue
        if one.account.journal.first in other.account.continues:
            raise BadInput(
                "run-copied",
                f"{one.name} went on as {other.name}, which counts all that it released; leave "
                f"{one.name} out",
            )
        copied = one.account.drawn.is_copy_of(other.account.drawn)
        if copied and one.account.journal.head in other.account.journal.heads:
            raise BadInput(
                "run-copied",
                f"{one.name} is a copy of {other.name}, whose ledger counts all that it released; "
                f"leave {one.name} out",
            )


def identities(subjects: Sequence[Subject]) -> dict[str, str]:
    """The identities of the records that the runs were made on; empty unless all were made with
    one key, since others cannot be compared."""
    accounts = [one.account for one in subjects]
    keys = {one.secret.data_key if one and one.secret else None for one in accounts}
    if None in keys or len(keys) > 1:
        return {}
    return {one.name: one.account.opening.data for one in subjects if one.account}
