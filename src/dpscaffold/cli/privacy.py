"""``dpscaffold privacy``: what a plan, a configuration, a run or several runs guarantee, and to
whom; and the noise or the rounds for what is wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markdown import Markdown

from dpscaffold.algorithms import DEFAULT
from dpscaffold.algorithms.naming import build, factory_of
from dpscaffold.checks import choice, floor_share, shares
from dpscaffold.cli.usage import refuse_given
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.errors import BadInput
from dpscaffold.privacy import (
    Facts,
    Mechanism,
    Part,
    Statement,
    adversaries,
    digits_up,
    largest_rounds,
    page,
    round_up,
    solve_noise,
    solve_noise_for_guess,
    state,
)
from dpscaffold.privacy.mechanism import Sampling, Unit
from dpscaffold.runs.budget_file import BudgetFile, BudgetFileContents
from dpscaffold.runs.stating import Subject, of_model, subject_of, together

#: The numbers of a plan that has no file; without the first seven there is no run.
NUMBERS = (
    *("users", "records", "rounds", "local_steps", "user_ratio", "data_ratio", "noise"),
    *("sampling", "unit", "algorithm"),
)
NEEDED = NUMBERS[:7]


def privacy_command(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A configuration, run folder, model folder or budget file; several run folders "
            "are added up. Or a plan in options."
        ),
    ] = None,
    users: Annotated[int | None, typer.Option(help="M, the number of users.")] = None,
    records: Annotated[int | None, typer.Option(help="R, the training records per user.")] = None,
    rounds: Annotated[int | None, typer.Option(help="T, the number of rounds.")] = None,
    local_steps: Annotated[int | None, typer.Option(help="K, local steps in a round.")] = None,
    user_ratio: Annotated[float | None, typer.Option(help="l, the share of users a round.")] = None,
    data_ratio: Annotated[
        float | None, typer.Option(help="s, the share of records a batch.")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="σ, in units of the sensitivity 2C/b.")
    ] = None,
    sampling: Annotated[str | None, typer.Option(help="fixed (default) or poisson.")] = None,
    unit: Annotated[str | None, typer.Option(help="record (default) or user.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help=f"Its name in [algorithm]; {DEFAULT} if left out.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ; else 1/(10 × all records).")] = None,
    colluders: Annotated[
        int | None, typer.Option(help="Participants who share what they know; else 1.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Find the noise for this ε, or open a budget file.")
    ] = None,
    already_spent: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="EPSILON DELTA", help="What a new budget file counts as spent."),
    ] = None,
    guess: Annotated[
        float | None, typer.Option(help="Find the noise for guesses right so often, in %.")
    ] = None,
    solve: Annotated[
        str | None, typer.Option(help="Find noise (default) or rounds for --epsilon.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="server (default), third-party or participant.")
    ] = None,
    fixed_in_advance: Annotated[
        bool, typer.Option("--fixed-in-advance", help="No plan was made after seeing a result.")
    ] = False,
    same_records: Annotated[
        bool, typer.Option("--same-records", help="All runs are on the same records.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """State what a plan, a configuration or a run guarantees; solve for noise or rounds; add runs.

    Example: dpscaffold privacy runs/clinics

    Example: dpscaffold privacy run.toml --epsilon 1
    """
    values = locals()
    numbers = {name: values[name] for name in NUMBERS}
    sources = sources or []
    several = {"--fixed-in-advance": fixed_in_advance, "--same-records": same_records}
    if len(sources) < 2:
        refuse_given(several, "which is about several runs; name at least 2 run folders")
    if len(sources) == 1 and sources[0].suffix == ".jsonl":
        _refuse_numbers(numbers, sources[0])
        others: dict[str, object] = {"--guess": guess, "--colluders": colluders}
        others |= {"--solve": solve, "--against": against}
        refuse_given(others, f"and {sources[0]} is a budget file; leave it out")
        _show_budget(_budget(sources[0], epsilon, delta, already_spent), as_json)
        return
    refuse_given(
        {"--already-spent": already_spent},
        "which is about a new budget file; name one (FILE.jsonl), with its --epsilon and --delta",
    )
    if len(sources) == 1 and (stored := of_model(sources[0])):
        given: dict[str, object] = {"--delta": delta, "--colluders": colluders}
        given |= {"--epsilon": epsilon, "--guess": guess}
        given |= {"--solve": solve, "--against": against}
        refuse_given(given, "and the statement of a model is what its run wrote; name the run")
        _show(stored, as_json, str(sources[0]))
        return
    solving = epsilon is not None or guess is not None
    if not solving:
        asked = {"--solve": solve, "--against": against}
        refuse_given(asked, "which is about what is solved for; give --epsilon or --guess too")
    solve, against = solve or "noise", against or "server"
    if solving and not sources:
        numbers = _to_solve(numbers, solve)
    subjects = _read(sources, numbers, delta, colluders)
    if solving:
        _show_solved(subjects, epsilon, guess, solve, against, as_json)
        return
    title = " and ".join(one.name for one in subjects)
    _show(together(subjects, fixed_in_advance, same_records), as_json, title)


def _read(
    sources: Sequence[Path],
    numbers: Mapping[str, Any],
    delta: float | None,
    colluders: int | None,
) -> list[Subject]:
    """What is asked about; the δ of several runs is shared out evenly among them."""
    if not sources:
        run = plan_of(numbers, delta)
        facts = Facts(colluders=1 if colluders is None else colluders)
        return [Subject("this plan", (Part(run, run.rounds),), facts)]
    _refuse_numbers(numbers, sources[0])
    each = None if delta is None else delta / len(sources)
    found = []
    for source in sources:
        subject = subject_of(source, each)
        if not subject.parts:
            given = {"--delta": delta, "--colluders": colluders}
            refuse_given(given, f"and {source} promises nothing; leave it out")
        if colluders is not None:
            subject = replace(subject, facts=replace(subject.facts, colluders=colluders))
        found.append(subject)
    return found


def _to_solve(numbers: Mapping[str, Any], solve: str) -> dict[str, Any]:
    """The numbers of a plan with something in the place of the one that is asked for, which plays
    no part."""
    asked = choice("--solve", solve, ("noise", "rounds"))
    refuse_given({_option(asked): numbers[asked]}, "and it is what is solved for; leave it out")
    return {**numbers, asked: 1}


def plan_of(numbers: Mapping[str, Any], delta: float | None = None) -> Mechanism:
    """The run that the options describe; every missing or impossible one is named.

    >>> given = dict(users=100, records=4000, rounds=400, local_steps=50, user_ratio=0.2,
    ...              data_ratio=0.2, noise=60.0)
    >>> run = plan_of(given)
    >>> run.cohort_size, run.groups[0].batch
    (20, 800)
    """
    missing = [_option(name) for name in NEEDED if numbers.get(name) is None]
    if missing:
        raise BadInput(
            "missing-argument",
            f"missing {', '.join(missing)}; give them all, or a configuration or a run folder",
        )
    for name in ("user_ratio", "data_ratio"):
        if not 0.0 < numbers[name] <= 1.0:
            raise BadInput(
                "out-of-range",
                f"{_option(name)} is {numbers[name]}; give a fraction above 0 and at most 1",
            )
    if floor_share(numbers["user_ratio"], numbers["users"]) < 1:
        raise BadInput(
            "no-participants",
            f"--user-ratio is {numbers['user_ratio']}, which selects none of {numbers['users']} "
            f"users",
        )
    name = numbers.get("algorithm") or DEFAULT
    factory_of(name, argument="--algorithm")
    sampling: Any = choice("--sampling", numbers.get("sampling") or "fixed", get_args(Sampling))
    unit: Any = choice("--unit", numbers.get("unit") or "record", get_args(Unit))
    sizes = [numbers["records"]] * numbers["users"]
    return Gaussian(noise=numbers["noise"], sampling=sampling, unit=unit).run(
        build(name),
        Plan(rounds=numbers["rounds"], local_steps=numbers["local_steps"]),
        sizes,
        **shares(sizes, numbers["user_ratio"], numbers["data_ratio"]),
        declared=False,
        delta=delta,
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_numbers(numbers: Mapping[str, Any], source: Path) -> None:
    """Refuse options that a file already answers."""
    given = {_option(name): value for name, value in numbers.items()}
    refuse_given(given, f"and {source} already says it; give one or the other")


def _show(said: Statement, as_json: bool, title: str) -> None:
    if as_json:
        typer.echo(json.dumps(said.to_json(), indent=2, allow_nan=False))
        return
    text, console = page(said, title), Console(highlight=False)
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        typer.echo(text, nl=False)


def _show_solved(
    subjects: Sequence[Subject],
    epsilon: float | None,
    guess: float | None,
    solve: str,
    against: str,
    as_json: bool,
) -> None:
    """The noise or the rounds that are asked for, and what is then promised."""
    asked = choice("--solve", solve, ("noise", "rounds"))
    if len(subjects) > 1 or len(subjects[0].parts) != 1 or subjects[0].account is not None:
        raise BadInput(
            "not-applicable",
            "--epsilon and --guess solve for one plan; name a configuration, or give its numbers",
        )
    if None not in (epsilon, guess):
        raise BadInput("conflicting-arguments", "--epsilon and --guess are given; give one of them")
    if guess is not None and asked == "rounds":
        raise BadInput(
            "not-applicable", "--solve is rounds, which is found for an ε; give --epsilon"
        )
    (part,), facts = subjects[0].parts, subjects[0].facts
    known = adversaries(part.run, facts.colluders)
    who = known[choice("--against", against.replace("-", "_"), tuple(known))]
    if epsilon is None:
        assert guess is not None
        run = replace(part.run, noise=solve_noise_for_guess(part.run, guess / 100, who, part.costs))
    elif asked == "noise":
        run = replace(part.run, noise=solve_noise(part.run, epsilon, who, part.costs))
    else:
        run = replace(part.run, rounds=largest_rounds(part.run, epsilon, who, part.costs))
    said = state([replace(part, run=run, rounds=run.rounds)], facts)
    if as_json:
        values = {"noise": run.noise, "rounds": run.rounds, **said.to_json()}
        typer.echo(json.dumps(values, indent=2, allow_nan=False))
        return
    found = f"noise = {run.noise:g}" if asked == "noise" else f"rounds = {run.rounds}"
    typer.echo(f"{found}\n")
    _show(said, as_json=False, title=subjects[0].name)


def _budget(
    path: Path,
    epsilon: float | None,
    delta: float | None,
    already: tuple[float, float] | None,
) -> BudgetFileContents:
    """The contents of a budget file, which is made where its ε and δ are given."""
    if (epsilon is None) != (delta is None):
        one, other = ("--epsilon", "--delta") if delta is None else ("--delta", "--epsilon")
        raise BadInput(
            "missing-argument",
            f"{one} is given without {other}; give both to open a new budget file",
        )
    if epsilon is None:
        refuse_given(
            {"--already-spent": already},
            "and what an open budget file counts is never changed; give --epsilon and --delta of "
            "a new one",
        )
    if epsilon is not None and delta is not None:
        BudgetFile.open(path, epsilon, delta, already or (0.0, 0.0))
    return BudgetFile(path).read()


def _show_budget(contents: BudgetFileContents, as_json: bool) -> None:
    """A line for each run, then what is spent and left: spent rounded up, left rounded down."""
    if as_json:
        typer.echo(json.dumps(contents.to_json(), indent=2, allow_nan=False))
        return
    for run, grant in contents.grants.items():
        done = contents.participations.get(run, 0)
        typer.echo(
            f"{run}: {done} of {grant.rounds} rounds, epsilon = {round_up(grant.epsilon)}, "
            f"delta = {digits_up(grant.delta)}, {grant.neighbours}"
        )
    (spent, spent_delta), (left, left_delta) = contents.spent, contents.left
    typer.echo(
        f"granted: epsilon = {round_up(spent)} of {contents.epsilon:g}, delta = "
        f"{digits_up(spent_delta)} of {contents.delta:g} (sums: Rogers, Roth, Ullman, Vadhan 2016)"
    )
    typer.echo(f"left: epsilon = {int(left * 1000) / 1000:.3f}, delta = {left_delta:.3g}")
