"""``dpscaffold privacy``: what a plan, a configuration or a run folder guarantees, and to whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dpscaffold.algorithms import ALGORITHMS, DEFAULT
from dpscaffold.algorithms.naming import build, factory_of
from dpscaffold.checks import floor_share
from dpscaffold.description import describe_run
from dpscaffold.errors import BadInput
from dpscaffold.privacy import (
    VIEWS,
    Bound,
    Ledger,
    Preparation,
    PrivacyError,
    Run,
    TradeOff,
    bound_for,
    charged,
    statement,
)
from dpscaffold.privacy.describe import choose_relation
from dpscaffold.privacy.human import GROUPS, losses
from dpscaffold.privacy.showing import round_up
from dpscaffold.privacy.statement import NO_NOISE
from dpscaffold.runledger import Account, read_account

Source = Annotated[
    Path | None, typer.Argument(help="a configuration (TOML) or a run folder, instead of numbers")
]
Sources = Annotated[
    list[Path] | None,
    typer.Argument(
        help="a configuration (TOML) or a run folder, instead of numbers; several run folders are "
        "put together"
    ),
]
Users = Annotated[int | None, typer.Option("--users", help="M, the number of users")]
Records = Annotated[int | None, typer.Option("--records", help="R, training records per user")]
Rounds = Annotated[int | None, typer.Option("--rounds", help="T, warm-start rounds included")]
LocalSteps = Annotated[int | None, typer.Option("--local-steps", help="K")]
UserRatio = Annotated[
    float | None, typer.Option("--user-ratio", help="l: ⌊lM⌋ users take part in a round")
]
DataRatio = Annotated[
    float | None, typer.Option("--data-ratio", help="s: a batch holds ⌊sR⌋ records")
]
Noise = Annotated[
    float | None, typer.Option("--noise", help="σ_g, in units of the sensitivity 2C/b")
]
Sampling = Annotated[str | None, typer.Option("--sampling", help="fixed (default) or poisson")]
AlgorithmName = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        help=f"one of {', '.join(ALGORITHMS)}, or my_file:factory; {DEFAULT} by default",
    ),
]
Unit = Annotated[str | None, typer.Option("--unit", help="record (default) or user")]
Neighbours = Annotated[
    str | None,
    typer.Option(
        "--neighbours",
        help="replace-one (fixed batches), zero-out or add-remove (poisson, declared sizes)",
    ),
]
Delta = Annotated[float | None, typer.Option("--delta", help="δ; 1/(10 × all records) by default")]
View = Annotated[
    str | None,
    typer.Option("--view", help="only this view: server, third-party or participant"),
]
Colluders = Annotated[
    int | None,
    typer.Option("--colluders", help="k participants who pool what they know; 1 by default"),
]
Cap = Annotated[
    int | None, typer.Option("--max-participations", help="after so many, a user declines")
]


@dataclass(frozen=True)
class Subject:
    """What a statement is about: a run and what its data add, or the account of a run folder."""

    run: Run | None
    preparation: tuple[Preparation, ...] = ()
    extra_costs: tuple[Any, ...] = ()
    account: Account | None = None
    colluders: int = 1
    simulated: bool = False
    draw_given: bool = False
    allowed: tuple[str, ...] | None = None

    @property
    def ledger(self) -> Ledger | None:
        """Who took part, where there is a run folder."""
        return self.account.ledger if self.account else None

    def statement(
        self, groups: tuple[int, ...] = GROUPS, colluders: int | None = None
    ) -> dict[str, Any]:
        """What may be said; of a run folder, the very statement that its run writes."""
        if self.account:
            return self.account.statement(groups, colluders)
        return statement(
            self.run,
            preparation=self.preparation,
            seed_public=self.simulated,
            draw_given=self.draw_given,
            allowed=self.allowed,
            extra_costs=self.extra_costs,
            groups=groups,
            colluders=self.colluders if colluders is None else colluders,
        )


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
    as_json: Annotated[bool, typer.Option("--json", help="print the statement as JSON")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="draw ε against rounds to this file")
    ] = None,
    tradeoff: Annotated[
        Path | None, typer.Option("--tradeoff", help="draw the trade-off curve to this file")
    ] = None,
    group: Annotated[
        list[int] | None,
        typer.Option("--group", help="k records of one person together; may be repeated"),
    ] = None,
    fixed_in_advance: Annotated[
        bool,
        typer.Option(
            "--fixed-in-advance",
            help="several runs: no plan was chosen after seeing another run's outputs",
        ),
    ] = False,
    same_records: Annotated[
        bool,
        typer.Option("--same-records", help="several runs: their records are the same, unchecked"),
    ] = False,
) -> None:
    """Say what a run guarantees: ε by view and bound, with δ, neighbours, theorem, and what to
    quote."""
    numbers = {
        "users": users,
        "records": records,
        "rounds": rounds,
        "local_steps": local_steps,
        "user_ratio": user_ratio,
        "data_ratio": data_ratio,
        "noise": noise,
        "sampling": sampling,
        "algorithm": algorithm,
        "unit": unit,
        "neighbours": neighbours,
        "max_participations": max_participations,
    }
    if sources and len(sources) > 1:
        several(sources, numbers, delta, fixed_in_advance, same_records, as_json, (plot, tradeoff))
        return
    if fixed_in_advance or same_records:
        option = "--fixed-in-advance" if fixed_in_advance else "--same-records"
        raise PrivacyError(f"{option} is about several runs; name at least 2 run folders")
    source = sources[0] if sources else None
    chosen = checked_view(view)
    about = from_source(source, numbers, delta) if source else Subject(from_numbers(numbers, delta))
    if about.run is not None and about.run.noise == 0.0:
        raise PrivacyError(f"{NO_NOISE}; give a noise above 0")
    said = about.statement(tuple(group) if group else GROUPS, colluders)
    if tradeoff is not None:
        draw_tradeoff(about, said, tradeoff)
    if plot is not None:
        from dpscaffold.report.privacy_plot import plot_epsilon

        if about.run is None or not said["guarantee"]:
            raise PrivacyError(f"there is no epsilon to draw: {said['reason']}")
        plot_epsilon(about.run, plot, about.extra_costs, said["participant"]["colluders"])
    if as_json:
        typer.echo(json.dumps(said, indent=2, allow_nan=False))
    else:
        show(said, Console(soft_wrap=False), chosen)
        for path in (plot, tradeoff):
            if path is not None:
                typer.echo(f"plot: {path}")


def several(
    sources: list[Path],
    numbers: dict[str, Any],
    delta: float | None,
    fixed_in_advance: bool,
    same_records: bool,
    as_json: bool,
    plots: tuple[Path | None, ...],
) -> None:
    """What several runs over the same records promise together."""
    from dpscaffold.cli.together import compose, show_together

    refuse_numbers(numbers, sources[0])
    if any(path is not None for path in plots):
        raise PrivacyError("a plot is about one run; leave out --plot and --tradeoff, or name one")
    if delta is not None and not 0.0 < delta < 1.0:
        raise PrivacyError(f"delta={delta} is not a probability strictly between 0 and 1")
    answer = compose(sources, delta, fixed_in_advance, same_records)
    if as_json:
        typer.echo(json.dumps(answer.to_json(), indent=2, allow_nan=False))
    else:
        show_together(answer, Console(soft_wrap=False))


def draw_tradeoff(about: Subject, said: dict[str, Any], path: Path) -> None:
    """The trade-off curve of the bounds that are quoted, one line per different bound."""
    from dpscaffold.report.tradeoff_plot import plot_tradeoff

    if about.run is None or not said["guarantee"]:
        raise PrivacyError(f"there is no trade-off to draw: {said['reason']}")
    repeats = about.ledger.repeats if about.ledger else ()
    quoted: dict[Bound, list[str]] = {}
    for view in VIEWS:
        bound = bound_for(about.run, view, repeats, said["participant"]["colluders"])
        quoted.setdefault(bound, []).append(view.replace("_", " "))
    curves = {
        ", ".join(views): TradeOff.of(
            losses(bound, about.run, said["rounds"], about.extra_costs, repeats)
        )
        for bound, views in quoted.items()
    }
    plot_tradeoff(curves, path, said["human"]["server"]["groups"][-1]["size"])


def checked_view(view: str | None) -> tuple[str, ...]:
    """The views to show: all of them, or the one that is asked for."""
    if view is None:
        return tuple(VIEWS)
    name = view.replace("-", "_")
    if name not in VIEWS:
        raise PrivacyError(f"--view is {view!r}; give server, third-party or participant")
    return (name,)


def from_numbers(numbers: dict[str, Any], delta: float | None, noise: float | None = None) -> Run:
    """The run that the options describe; every missing or impossible one is named.

    >>> run = from_numbers({"users": 100, "records": 4000, "rounds": 400, "local_steps": 50,
    ...                     "user_ratio": 0.2, "data_ratio": 0.2, "noise": 60.0}, delta=None)
    >>> run.participants, run.worst.batch
    (20, 800)
    """
    numbers = {**numbers, **({"noise": noise} if noise is not None else {})}
    needed = ("users", "records", "rounds", "local_steps", "user_ratio", "data_ratio", "noise")
    missing = [f"--{name.replace('_', '-')}" for name in needed if numbers.get(name) is None]
    if missing:
        raise PrivacyError(
            f"missing {', '.join(missing)}; give them all, or a configuration or a run folder"
        )
    for name in ("user_ratio", "data_ratio"):
        if not 0.0 < numbers[name] <= 1.0:
            raise PrivacyError(
                f"--{name.replace('_', '-')} is {numbers[name]}; give a fraction above 0 and at "
                f"most 1"
            )
    name = numbers.get("algorithm") or DEFAULT
    try:
        factory_of(name, argument="--algorithm")
        algorithm = build(name)
    except BadInput as error:
        raise PrivacyError(str(error)) from error
    if floor_share(numbers["user_ratio"], numbers["users"]) < 1:
        raise PrivacyError(
            f"--user-ratio is {numbers['user_ratio']}, which selects none of {numbers['users']} "
            f"users"
        )
    sampling: Any = numbers.get("sampling") or "fixed"
    unit: Any = numbers.get("unit") or "record"
    # Numbers on a command line are declared: nothing is read off data.
    chosen = choose_relation(numbers.get("neighbours"), sampling, unit, declared=True)
    return describe_run(
        [numbers["records"]] * numbers["users"],
        algorithm,
        rounds=numbers["rounds"],
        local_steps=numbers["local_steps"],
        user_ratio=numbers["user_ratio"],
        data_ratio=numbers["data_ratio"],
        noise=numbers["noise"],
        sampling=sampling,
        unit=unit,
        declared_sizes=chosen == "add-remove",
        delta=delta,
        max_participations=numbers.get("max_participations"),
    )


def refuse_numbers(numbers: dict[str, Any], source: Path) -> None:
    """Refuse options that a run folder or a configuration already answers."""
    given = [f"--{name.replace('_', '-')}" for name, value in numbers.items() if value is not None]
    if given:
        raise PrivacyError(
            f"{given[0]} is given beside {source}, which already says it; give one or the other"
        )


def from_source(source: Path, numbers: dict[str, Any], delta: float | None) -> Subject:
    """What a run folder or a configuration describes."""
    refuse_numbers(numbers, source)
    about = from_folder(source) if source.is_dir() else from_config(source)
    if delta is None or about.run is None:
        return about
    run = Run.from_dict({**about.run.to_dict(), "delta": delta})
    return replace(about, run=run, account=about.account and about.account.at_delta(delta))


def from_folder(folder: Path) -> Subject:
    """A run folder: its ledger holds the description of the run, so nothing else is needed."""
    account = read_account(folder)
    return Subject(
        account.ledger.run, account.preparation, account.costs, account, account.colluders
    )


def from_config(path: Path) -> Subject:
    """A configuration: the run it would make on its data."""
    from dpscaffold.config import load
    from dpscaffold.data.loading import load_federation

    if not path.exists():
        raise PrivacyError(
            f"{path} does not exist; give a configuration (TOML), a run folder, or numbers"
        )
    settings = load(path)
    federation = load_federation(settings.data)
    limits = settings.privacy
    setting = settings.setting(federation)
    run = setting.describe()
    if run is None or limits is None:
        return Subject(None, federation.preparation)
    costs, unprotected = charged(federation.preparation, run)
    steps = (*federation.preparation, *unprotected)
    return Subject(
        run,
        steps,
        costs,
        colluders=limits.budget.colluders,
        simulated=not limits.hidden,
        draw_given=not limits.release,
        allowed=(limits.allow or ()) if limits.release else None,
    )


def show(said: dict[str, Any], console: Console, views: Sequence[str] = tuple(VIEWS)) -> None:
    """The table of views × bounds, the assumptions that all share, and what to quote."""
    if said["bounds"]:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("view", no_wrap=True)
        table.add_column("epsilon", justify="right", no_wrap=True)
        table.add_column("bound", no_wrap=True)
        table.add_column("theorem", overflow="fold")
        for view in views:
            for row in said["bounds"]:
                if view in row["views"] and row["applies"]:
                    quoted = said[view].get("bound") == row["name"]
                    mark = " ← quote" if quoted else ""
                    style = "bold" if quoted else ""
                    table.add_row(
                        view,
                        round_up(row["epsilon"]),
                        row["name"] + mark,
                        row["theorem"],
                        style=style,
                    )
        if table.row_count:
            console.print(table)
        console.print(f"delta: {said['delta']:.4g}", highlight=False)
        show_deltas(said, console, views)
        console.print(f"neighbours: {said['mechanism']['neighbours']}", highlight=False)
    if said.get("human"):
        show_human(said["human"], console)
    console.print(f"quote: {said['quote']}", highlight=False)
    for row in said["bounds"] if said["guarantee"] else []:
        if not row["applies"]:
            console.print(
                f"{row['name']} does not apply: {row['reason']}", style="dim", highlight=False
            )
    if "journal" in said:
        console.print(f"head of the journal: {said['journal']['head']}", style="dim")
    for sentence in said["outside"]:
        console.print(f"outside the guarantee: {sentence}", style="dim", highlight=False)


def show_deltas(said: dict[str, Any], console: Console, views: Sequence[str]) -> None:
    """ε at smaller δ, one line a view."""
    for view in views if said.get("epsilon_by_delta") else ():
        shown = ", ".join(
            f"{round_up(row[view])} at {row['delta']:.3g}" for row in said["epsilon_by_delta"]
        )
        console.print(f"epsilon by delta, {view.replace('_', ' ')}: {shown}", highlight=False)


def show_human(human: dict[str, Any], console: Console) -> None:
    """The best membership test by view, and several records of one person."""
    from dpscaffold.report.human_terms import groups_table, terms_table

    for head, rows in (terms_table(human), groups_table(human)):
        table = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(human["server"]["sentence"], highlight=False)
