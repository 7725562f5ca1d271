"""``dpscaffold privacy RUN RUN …``: what several runs over the same records promise together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dpscaffold.cli.subject import Numbers, StatementSubject, from_source
from dpscaffold.privacy import VIEWS, Ledger, PrivacyError, bound_for
from dpscaffold.privacy.composition import GIVEN, JointGuarantee, RunPart, together
from dpscaffold.privacy.showing import round_up
from dpscaffold.report.fitting import legible
from dpscaffold.runs.data_key import KEY, read_key
from dpscaffold.runs.journal import Journal
from dpscaffold.runs.ledger import JOURNAL

SIMULATED = (
    "simulated: the noise of a run with a seed can be removed by whoever holds the seed; with "
    "secret noise the runs would guarantee this"
)
NOT_COMPARED = (
    "the runs count as over the same records, which were not compared: that needs runs made with "
    "one key (train --data-key FILE)"
)


def compose(
    sources: list[Path],
    delta: float | None,
    fixed_in_advance: bool,
    same_records: bool,
    colluders: int | None = None,
) -> JointGuarantee:
    """Read the runs and put them together; ``delta`` is shared out evenly among them.

    ``colluders`` participants pool what they know of all runs. By default they are as many as the
    run with the most of them takes into account: whoever colludes in one run may do so in all.
    """
    each = delta / len(sources) if delta is not None else None
    _refuse_repeated(sources)
    read = [(source, from_source(source, Numbers(), each)) for source in sources]
    _refuse_older_copies(read)
    own = max(about.colluders for _, about in read)
    data = identities(sources)
    if same_records and not data:
        raise PrivacyError(
            "not-applicable",
            "--same-records is given, but these records are not compared and count as the same "
            "anyway; leave it out",
        )
    data = {} if same_records else data
    parts = []
    for source, about in read:
        found = parts_of(source, about, _at_most(own, about) if colluders is None else colluders)
        if len(found) > 1 and fixed_in_advance:
            raise PrivacyError(
                "rounds-extended",
                f"--fixed-in-advance is given, and {source} was given more rounds after it was "
                f"planned, or continues another run; leave the option out, and its parts add",
            )
        parts += [replace(part, data=data.get(source)) for part in found]
    return together(parts, fixed_in_advance, own if colluders is None else colluders)


def _at_most(colluders: int, about: StatementSubject) -> int:
    """This many colluders, or all other users of a run where they are fewer."""
    return min(colluders, max(1, about.run.users - 1) if about.run else 1)


def parts_of(source: Path, about: StatementSubject, colluders: int) -> list[RunPart]:
    """One run folder or configuration, with the bounds it quotes; a run that was given more rounds
    comes in the parts that were planned one after another."""
    if about.run is None:
        raise PrivacyError(
            "no-privacy", f"{source} is a run without privacy, so nothing adds up; leave it out"
        )
    said = about.statement(colluders=colluders)
    if not said.guarantee:
        raise PrivacyError(
            "no-privacy", f"{source} has no guarantee ({said.reason}), so nothing adds up"
        )
    begun = [part for part in about.parts if part.rounds]
    ledgers: list[Ledger | None] = [*begun] if begun else [about.ledger]
    found = []
    for k, ledger in enumerate(ledgers):
        run, rounds = about.run, said.rounds or 0
        if ledger and about.parts:
            run, rounds = ledger.run, ledger.rounds
        repeats = ledger.repeats if ledger else ()
        part = RunPart(
            name=str(source) if len(ledgers) == 1 else f"{source} (part {k + 1})",
            run=run,
            rounds=rounds,
            bounds={view: bound_for(run, view, repeats, colluders) for view in VIEWS},
            ledger=ledger,
            costs=tuple(about.extra_costs) if k == 0 else (),
            secret=not about.simulated,
            drawn=about.drawn,
            source=str(source),
        )
        found.append(part)
    return found


def _refuse_repeated(sources: Sequence[Path]) -> None:
    places = [source.resolve() for source in sources]
    for k, source in enumerate(sources):
        if places[k] in places[:k]:
            raise PrivacyError("run-named-twice", f"{source} is given twice; a run is counted once")


def _refuse_older_copies(read: Sequence[tuple[Path, StatementSubject]]) -> None:
    """Refuse a folder that is a copy of another one as it was earlier, or still is."""
    for (one, about), (other, more) in itertools.permutations(read, 2):
        anchor = about.account.anchor if about.account else None
        if more.account and about.drawn.journal in more.account.continues:
            raise PrivacyError(
                "run-copied",
                f"{one} went on as {other}, which counts all that it released; leave {one} out",
            )
        if not about.drawn.is_copy_of(more.drawn) or anchor is None:
            continue
        if Journal(other / JOURNAL).follows(anchor):
            raise PrivacyError(
                "run-copied",
                f"{one} is a copy of {other}, whose ledger counts all that it released; leave "
                f"{one} out",
            )


def identities(sources: Sequence[Path]) -> dict[Path, str]:
    """The identities of the records that the runs were made on; empty unless all were made with
    one key, since others cannot be compared."""
    folders = [source for source in sources if (source / KEY).is_file()]
    if len(folders) < len(sources) or len({read_key(path / KEY) for path in folders}) > 1:
        return {}
    found = {}
    for source in sources:
        path = source / "run.json"
        try:
            found[source] = str(json.loads(path.read_text(encoding="utf-8"))["data"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PrivacyError("run-damaged", f"{path} is damaged ({error}); restore it") from error
    return found


def _explained_view(answer: JointGuarantee, views: Sequence[str]) -> str | None:
    """The first view of those shown that is explained in human terms; the quoted one first."""
    wanted = (GIVEN, *views) if answer.quoted == GIVEN else (*views, GIVEN)
    return next((view for view in wanted if view in answer.human), None)


def show_together(answer: JointGuarantee, console: Console, views: Sequence[str]) -> None:
    """A row per run and one for all, then how they were put together and what it means.

    ``views`` are the views to show.
    """
    shown = [view for view in answer.epsilon if view in (*views, GIVEN)]
    head = ("run", "rounds", *(f"epsilon, {_label(view)}" for view in shown), "delta")
    found = [(alone.name, str(alone.rounds), alone.epsilon, alone.delta) for alone in answer.runs]
    found.append(("together", "", answer.epsilon, answer.delta))
    rows = [
        (name, rounds, *(round_up(epsilon[view]) for view in shown), f"{delta:.3g}")
        for name, rounds, epsilon, delta in found
    ]
    console.print(legible(head, rows, console.width))
    view = _explained_view(answer, views)
    for sentence in sentences(answer, view):
        console.print(sentence, highlight=False)


def sentences(answer: JointGuarantee, view: str | None) -> list[str]:
    """What the numbers rest on, and what they mean for one person in this view."""
    k = answer.colluders
    said = [answer.method, f"neighbours: {answer.neighbours}"]
    if k > 1:
        said.append(f"participant: {k} participants of each run pool what they know")
    if answer.reason:
        said.append(answer.reason)
    elif answer.quoted == GIVEN:
        said.append(
            f"quote epsilon = {round_up(answer.epsilon[GIVEN])}, given who took part: the seed of "
            f"a draw was given, and over the draw holds only for a draw that nobody chose"
        )
    elif answer.quoted is None:
        said.append(
            "the seed of a draw is given, and over the draw holds only for a draw that nobody "
            "chose: quote what the runs say once they have run"
        )
    if answer.simulated:
        said.append(SIMULATED)
    if not answer.same_records:
        said.append(NOT_COMPARED)
    return [*said, answer.human[view].sentence()] if view else said


def _label(view: str) -> str:
    return "given who took part" if view == GIVEN else view.replace("_", " ")
