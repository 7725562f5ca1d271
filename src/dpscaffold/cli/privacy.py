"""``dpscaffold privacy``: what a plan, a configuration or a run folder guarantees, and to whom."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dpscaffold.algorithms import ALGORITHMS, DEFAULT
from dpscaffold.cli.subject import (
    Numbers,
    StatementSubject,
    from_numbers,
    from_source,
    refuse_numbers,
)
from dpscaffold.cli.usage import refuse_given
from dpscaffold.privacy import (
    VIEWS,
    PrivacyError,
)
from dpscaffold.privacy.bound import PARTICIPANT
from dpscaffold.privacy.errors import bad_delta
from dpscaffold.privacy.human import GROUPS
from dpscaffold.privacy.showing import digits_up, percent, round_up
from dpscaffold.privacy.statement import NO_NOISE
from dpscaffold.privacy.statement_types import HumanTerms, Statement
from dpscaffold.report.fitting import legible

Source = Annotated[
    Path | None,
    typer.Argument(help="Configuration file (TOML) or run folder, instead of the numbers below."),
]
Sources = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Configuration file (TOML) or run folder, instead of the numbers below. "
        "Several run folders are composed."
    ),
]
Users = Annotated[int | None, typer.Option("--users", help="M, the number of users.")]
Records = Annotated[int | None, typer.Option("--records", help="R, the training records per user.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", help="T, the number of rounds, warm start included.")
]
LocalSteps = Annotated[
    int | None, typer.Option("--local-steps", help="K, the number of local steps in a round.")
]
UserRatio = Annotated[
    float | None, typer.Option("--user-ratio", help="l, the share of users in a round.")
]
DataRatio = Annotated[
    float | None, typer.Option("--data-ratio", help="s, the share of a user's records in a batch.")
]
Noise = Annotated[
    float | None,
    typer.Option("--noise", help="σ_g, the noise multiplier in units of the sensitivity 2C/b."),
]
Sampling = Annotated[
    str | None, typer.Option("--sampling", help="Batches: fixed (default) or poisson.")
]
AlgorithmName = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        help=f"Algorithm: {', '.join(ALGORITHMS)}, or my_file:factory. Default: {DEFAULT}.",
    ),
]
Unit = Annotated[
    str | None, typer.Option("--unit", help="What is protected: record (default) or user.")
]
Neighbours = Annotated[
    str | None,
    typer.Option(
        "--neighbours",
        help="Neighbouring datasets: replace-one (fixed batches), zero-out or add-remove "
        "(Poisson batches).",
    ),
]
Delta = Annotated[float | None, typer.Option("--delta", help="δ. Default: 1/(10 × all records).")]
View = Annotated[
    str | None,
    typer.Option("--view", help="Only this adversary: server, third-party or participant."),
]
Colluders = Annotated[
    int | None,
    typer.Option(
        "--colluders", help="Number of participants who share what they know. Default: 1."
    ),
]
Cap = Annotated[
    int | None,
    typer.Option(
        "--max-participations", help="Largest number of rounds that a user takes part in."
    ),
]


def privacy(
    sources: Sources = None,
    users: Users = None,
    records: Records = None,
    rounds: Rounds = None,
    local_steps: LocalSteps = None,
    user_ratio: UserRatio = None,
    data_ratio: DataRatio = None,
    noise: Noise = None,
    sampling: Sampling = None,
    algorithm: AlgorithmName = None,
    unit: Unit = None,
    neighbours: Neighbours = None,
    delta: Delta = None,
    max_participations: Cap = None,
    view: View = None,
    colluders: Colluders = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Of a run: show all bounds, theorems and deltas, and what is outside ε."
        ),
    ] = False,
    only_quote: Annotated[
        bool,
        typer.Option("--quote", help="Print only the sentence to quote, with all its conditions."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statement as JSON.")] = False,
    fixed_in_advance: Annotated[
        bool,
        typer.Option(
            "--fixed-in-advance",
            help="Several runs: declare that no plan was chosen after seeing another run's "
            "outputs.",
        ),
    ] = False,
    same_records: Annotated[
        bool,
        typer.Option(
            "--same-records", help="Several runs: declare that their records are the same."
        ),
    ] = False,
) -> None:
    """Show the privacy guarantee of a plan, a configuration or a run, by adversary and bound.

    Example: dpscaffold privacy runs/clinics
    """
    numbers = Numbers(
        *(users, records, rounds, local_steps, user_ratio, data_ratio, noise),
        *(sampling, algorithm, unit, neighbours, max_participations),
    )
    _refuse_two_forms({"--all": everything, "--quote": only_quote, "--json": as_json})
    if sources and len(sources) > 1:
        refuse_numbers(numbers, sources[0])
        alone = {"--all": everything, "--quote": only_quote}
        refuse_given(alone, "which is about one run; leave it out, or name one")
        several(
            *(sources, delta, fixed_in_advance, same_records),
            *(colluders, checked_view(view, as_json), as_json),
        )
        return
    pairs = {"--fixed-in-advance": fixed_in_advance, "--same-records": same_records}
    refuse_given(pairs, "which is about several runs; name at least 2 run folders")
    source = sources[0] if sources else None
    folder = source if source is not None and source.is_dir() else None
    chosen = checked_view(view, as_json)
    if folder is None:
        refuse_given({"--all": everything}, "and all is shown unless a run is named; leave it out")
    if only_quote:
        refuse_given({"--view": view}, "and does not change the quote; leave it out")
    about = _subject(source, numbers, delta)
    said = about.statement(GROUPS, colluders)
    if not said.guarantee:
        given: dict[str, object] = {"--delta": delta, "--view": view, "--colluders": colluders}
        refuse_given(given, f"but nothing is guaranteed ({said.reason}); leave it out")
    if as_json:
        typer.echo(json.dumps(said.to_json(), indent=2, allow_nan=False))
    elif only_quote:
        typer.echo(said.quote)
    else:
        # Parts are printed one by one.
        details = any((everything, view, colluders is not None, said.parts))
        _tell(said, None if details else folder, chosen)


def _refuse_two_forms(shown: Mapping[str, bool]) -> None:
    given = [option for option, on in shown.items() if on]
    if len(given) > 1:
        raise PrivacyError(
            "conflicting-arguments",
            f"{given[0]} is given together with {given[1]}; give one of them",
        )


def _subject(source: Path | None, numbers: Numbers, delta: float | None) -> StatementSubject:
    """The run that is named, or that the numbers describe; one without noise is refused."""
    if source:
        about = from_source(source, numbers, delta)
    else:
        about = StatementSubject(from_numbers(numbers, delta))
    if about.run is not None and about.run.noise == 0.0:
        raise PrivacyError("no-noise", f"{NO_NOISE}; give a noise above 0")
    return about


def _tell(said: Statement, folder: Path | None, views: Sequence[str]) -> None:
    """The short form for a run folder, or else everything."""
    console = Console(soft_wrap=False)
    if folder is not None:
        show_short(said, folder, console)
    else:
        show(said, console, views)


def several(
    sources: list[Path],
    delta: float | None,
    fixed_in_advance: bool,
    same_records: bool,
    colluders: int | None,
    views: Sequence[str],
    as_json: bool,
) -> None:
    """What several runs over the same records guarantee together."""
    from dpscaffold.cli.together import compose, show_together

    if delta is not None and not 0.0 < delta < 1.0:
        raise PrivacyError("out-of-range", bad_delta("--delta", delta))
    answer = compose(sources, delta, fixed_in_advance, same_records, colluders)
    if as_json:
        typer.echo(json.dumps(answer.to_json(), indent=2, allow_nan=False))
    else:
        show_together(answer, Console(soft_wrap=False), views)


def checked_view(view: str | None, as_json: bool = False) -> tuple[str, ...]:
    """The views to show: all of them, or the one that is asked for. JSON holds all of them."""
    if view is None:
        return tuple(VIEWS)
    if as_json:
        raise PrivacyError(
            "conflicting-arguments",
            f"--view is {view!r}, and --json holds every view; give one or the other",
        )
    name = view.replace("-", "_")
    if name not in VIEWS:
        raise PrivacyError(
            "unknown-view", f"--view is {view!r}; give server, third-party or participant"
        )
    return (name,)


def show_short(said: Statement, folder: Path, console: Console) -> None:
    """What a run guarantees, on one screen."""
    from dpscaffold.report.ending import outside_names, privacy_line

    console.print(f"privacy  {privacy_line(said)}", highlight=False)
    if said.human:
        console.print(said.person, highlight=False)
        rows = []
        for who, words in ADVERSARIES.items():
            entry = said.ledger if who == "ledger" else said.towards(who)
            epsilon = entry.epsilon if entry else None
            terms = said.human.get(who)
            if epsilon is not None:
                right = percent(terms.accuracy) if terms else "–"
                rows.append((words, round_up(epsilon), right))
        console.print(legible(("against", "ε", "best guess right"), rows, console.width))
    if said.delta_note:
        console.print(said.delta_note, highlight=False)
    console.print(f"outside  {', '.join(outside_names(said))}", highlight=False)
    more = f"dpscaffold privacy {folder} --all, --quote or --json; {folder}/privacy.md"
    console.print(f"more     {more}", highlight=False, soft_wrap=True)


#: The rows of the short table, by the key of a statement.
ADVERSARIES = {
    "server": "the server",
    "alone": "the server and all other sites",
    "third_party": "anyone who sees only the model",
    "participant": "a site that took part",
    "ledger": "anyone who knows who took part",
}


def show(said: Statement, console: Console, views: Sequence[str] = tuple(VIEWS)) -> None:
    """The table of views × bounds, the assumptions that all share, and what to quote."""
    if tuple(views) == tuple(VIEWS) and said.views:
        views = tuple(said.views)  # with secure sums, also what a site's own noise gives
    if said.bounds and said.mechanism is not None:
        show_bounds(said, console, views)
        console.print(f"delta: {digits_up(said.delta or 0.0, 4)}", highlight=False)
        show_deltas(said, console, views)
        console.print(f"neighbours: {said.mechanism.neighbours}", highlight=False)
    k = said.participant.colluders or 1
    if k > 1 and PARTICIPANT in views:
        console.print(f"participant: {k} participants pool what they know", highlight=False)
    if said.human:
        show_human(said, said.human, console)
    console.print(f"quote: {said.quote}", highlight=False)
    _show_remarks(said, console)


def _show_remarks(said: Statement, console: Console) -> None:
    """Bounds that do not apply, the journal, tuning, and what is outside the guarantee."""
    for row in said.bounds if said.guarantee else ():
        if not row.applies:
            console.print(f"{row.name} does not apply: {row.reason}", style="dim", highlight=False)
    if said.journal is not None:
        console.print(f"head of the journal: {said.journal.head}", style="dim")
    if said.tuning:
        console.print(f"tuning: {said.tuning}", style="dim", highlight=False)
    for sentence in said.outside:
        console.print(f"outside the guarantee: {sentence}", style="dim", highlight=False)


#: Terminals of fewer columns are shown bounds without their theorems.
NARROW = 60


def show_bounds(said: Statement, console: Console, views: Sequence[str]) -> None:
    """Every bound that applies, by view; the one to quote is marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("view", no_wrap=True)
    table.add_column("epsilon", justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    table.add_column("theorem", overflow="fold")
    short = []
    for view in views:
        # A draw that somebody chose is quoted alike towards everybody.
        first = said.quoted if said.quotes_ledger else None
        best = (first or said.towards(view)).bound
        for row in said.bounds:
            if view in row.views and row.applies:
                quoted = best == row.name
                cells = view, round_up(row.epsilon), row.name + " ← quote" * quoted
                table.add_row(*cells, row.theorem, style="bold" if quoted else "")
                short.append(cells)
    if short:
        narrow = console.width < NARROW
        heads = ("view", "epsilon", "bound")
        console.print(legible(heads, short, console.width) if narrow else table)


def show_deltas(said: Statement, console: Console, views: Sequence[str]) -> None:
    """ε at smaller δ, one line a view."""
    for view in views if said.epsilon_by_delta else ():
        shown = ", ".join(
            f"{round_up(row.by_view[view])} at {digits_up(row.delta)}"
            for row in said.epsilon_by_delta or ()
        )
        console.print(f"epsilon by delta, {view.replace('_', ' ')}: {shown}", highlight=False)


def show_human(said: Statement, human: Mapping[str, HumanTerms], console: Console) -> None:
    """The best membership test by view, and several records of one person."""
    from dpscaffold.report.human_tables import groups_table, terms_table

    for head, rows in (terms_table(human), groups_table(human)):
        console.print(legible(head, rows, console.width))
    console.print(said.person, highlight=False)
