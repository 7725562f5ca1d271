"""``dpscaffold calibrate``: the noise or the rounds that spend a given ε."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from dpscaffold.cli.privacy import (
    AlgorithmName,
    Cap,
    Colluders,
    DataRatio,
    Delta,
    LocalSteps,
    Neighbours,
    Noise,
    Records,
    Rounds,
    Sampling,
    Source,
    Unit,
    UserRatio,
    Users,
)
from dpscaffold.cli.subject import Numbers, StatementSubject, from_numbers, from_source
from dpscaffold.cli.usage import refuse_given
from dpscaffold.privacy import (
    RANDOM_PARTICIPATION,
    AttackGoal,
    Bound,
    Mechanism,
    PrivacyError,
    bound_for,
    calibrate_noise,
    human_terms,
    largest_rounds,
    noise_for,
    rounds_for,
)
from dpscaffold.privacy.bound import PARTICIPANT
from dpscaffold.privacy.showing import digits_up, round_up

SOLVE = ("noise", "rounds")


def calibrate(
    source: Source = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="The ε to keep.")] = None,
    guess: Annotated[
        float | None,
        typer.Option(
            "--guess",
            help="Instead of ε: a guess whether a record was used is right at most this many per "
            "cent of the time, such as 52.5 (a coin: 50).",
        ),
    ] = None,
    view: Annotated[
        str,
        typer.Option(
            "--view", help="Adversary: server, third-party, participant or paper-third-party."
        ),
    ] = "server",
    colluders: Colluders = None,
    solve: Annotated[
        str,
        typer.Option("--solve", help="What to solve for: noise or rounds."),
    ] = "noise",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Find the smallest noise, or the most rounds, for an ε or a share of right guesses.

    Example: dpscaffold calibrate clinics.toml --epsilon 1
    """
    goal = goal_from(epsilon, guess)
    if solve not in SOLVE:
        raise PrivacyError("unknown-choice", f"--solve is {solve!r}; give noise or rounds")
    numbers = Numbers(
        *(users, records, rounds, local_steps, user_ratio, data_ratio, noise),
        *(sampling, algorithm, unit, neighbours, max_participations),
    )
    solved = {"rounds": {"--rounds": rounds}}.get(solve, {"--noise": noise})
    if source is None:
        refuse_given(solved, "and it is what is solved for; leave it out")
    about = _subject(source, numbers, delta, solve)
    run, costs = about.run, about.extra_costs
    assert run is not None  # _subject refuses a run without privacy
    # The very bound that the run will state: one function chooses for both.
    bound = bound_for(run, view, colluders=about.colluders if colluders is None else colluders)
    if view != PARTICIPANT:
        refuse_given(
            {"--colluders": colluders}, "and is about participants; add --view participant"
        )
    given = {"--algorithm": algorithm, "--max-participations": max_participations}
    answer: dict[str, Any] = {
        "solve": solve,
        "view": view.replace("-", "_"),
        "bound": bound.name,
        "neighbours": run.neighbours,
        "notes": _notes(run, view, given),
        "target": goal.target,
    }
    if goal.kind == "advantage":
        answer |= {"target": guess, **solve_guess(run, goal, bound, costs, solve)}
    else:
        answer |= solve_epsilon(run, goal.target, bound, costs, solve)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
    else:
        _show(answer, Console())


def _notes(run: Mechanism, view: str, given: Mapping[str, object]) -> list[str]:
    """A sentence for each option that is given and changes nothing, whatever its value: the bound
    of this view is the same for all."""
    sums = replace(run, memory=False, one_sum=True, max_participations=None)
    others = {
        "--algorithm": replace(sums, memory=True),
        "--max-participations": replace(sums, max_participations=1),
    }
    bound = bound_for(sums, view)
    return [
        f"{option} makes no difference: the bound {bound.name} does not depend on it"
        for option, value in given.items()
        if value is not None and bound_for(others[option], view) is bound
    ]


def goal_from(epsilon: float | None, guess: float | None) -> AttackGoal:
    """The one goal that the options give: a guess that is right in x per cent of the cases has an
    advantage of 2x/100 − 1.

    >>> goal_from(None, 52.5).kind, round(goal_from(None, 52.5).target, 6)
    ('advantage', 0.05)
    """
    if epsilon is None and guess is None:
        raise PrivacyError(
            "missing-argument",
            "missing --epsilon; give the budget, a number above 0, or --guess, the per cent of "
            "guesses that may be right",
        )
    if epsilon is not None and guess is not None:
        raise PrivacyError(
            "conflicting-arguments", "--epsilon and --guess are both given; give one goal"
        )
    if guess is None:
        assert epsilon is not None
        return AttackGoal("epsilon", epsilon)
    if not 50 < guess < 100:
        raise PrivacyError(
            "out-of-range",
            f"--guess is {guess:g}; give a number above 50 (a coin) and below 100, in per cent",
        )
    return AttackGoal("advantage", 2 * guess / 100 - 1)


def solve_epsilon(
    run: Mechanism, epsilon: float, bound: Bound, costs: tuple[Any, ...], solve: str
) -> dict[str, Any]:
    """The noise or the rounds that keep to a budget of ``epsilon``."""
    if solve == "noise":
        run = replace(run, noise=calibrate_noise(run, epsilon, bound, costs))
        found = {"noise": run.noise, "rounds": run.rounds}
    else:
        run = replace(run, rounds=largest_rounds(run, epsilon, bound, costs=costs))
        found = {"rounds": run.rounds, "noise": run.noise}
    answer = {**found, "epsilon": bound.epsilon(run, costs=costs), "delta": run.delta}
    if run.secure is not None:
        answer["epsilon_alone"] = RANDOM_PARTICIPATION.epsilon(run, costs=costs)
    return answer


def solve_guess(
    run: Mechanism, goal: AttackGoal, bound: Bound, costs: tuple[Any, ...], solve: str
) -> dict[str, Any]:
    """The noise or the rounds with which guesses are right as rarely as asked, and what they
    reach."""
    if solve == "noise":
        run = replace(run, noise=noise_for(run, goal, bound, costs))
    else:
        run = replace(run, rounds=rounds_for(run, goal, bound, costs))
    human = human_terms(bound, run, None, tuple(costs))
    return {
        "noise": run.noise,
        "rounds": run.rounds,
        "guess": 100 * human.accuracy,
        "epsilon": bound.epsilon(run, costs=costs),
        "delta": run.delta,
        "sentence": human.sentence(),
    }


def _subject(source: Any, numbers: Numbers, delta: float | None, solve: str) -> StatementSubject:
    """The run to solve for, and what its data cost already; what is solved for needs no value of
    its own."""
    if source is not None:
        about = from_source(source, numbers, delta)
        if about.run is None:
            raise PrivacyError(
                "no-privacy", f"{source} describes a run without privacy; add a [privacy] table"
            )
        about.whole("calibrate")
        return about
    if solve == "noise" and numbers.noise is None:
        numbers = replace(numbers, noise=1.0)
    if solve == "rounds" and numbers.rounds is None:
        numbers = replace(numbers, rounds=1)
    return StatementSubject(from_numbers(numbers, delta))


def _show(answer: dict[str, Any], console: Console) -> None:
    key, epsilon = answer["solve"], round_up(answer["epsilon"])
    shown = digits_up(answer[key], 6) if key == "noise" else str(answer[key])
    console.print(f"{key} = {shown}", highlight=False)
    if "guess" in answer:
        right = digits_up(answer["guess"], 4)
        console.print(f"right guesses = {right} % of {answer['target']:g} %", highlight=False)
        console.print(answer["sentence"], highlight=False)
        reached = f"epsilon = {epsilon}, "
    else:
        reached = f"epsilon = {epsilon} of {answer['target']:g}, "
    console.print(
        f"{reached}delta = {digits_up(answer['delta'])}, view {answer['view']}, "
        f"bound {answer['bound']}",
        highlight=False,
    )
    if "epsilon_alone" in answer:
        alone = round_up(answer["epsilon_alone"])
        console.print(f"epsilon = {alone} if all other sites collude", highlight=False)
    for sentence in (f"neighbours: {answer['neighbours']}", *answer["notes"]):
        console.print(sentence, highlight=False)
