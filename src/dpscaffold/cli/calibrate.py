"""``dpscaffold calibrate``: the noise, the rounds, or the combinations that spend a given ε."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

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
    budget_table,
    calibrate_noise,
    human_terms,
    largest_rounds,
    noise_for,
    rounds_for,
)
from dpscaffold.privacy.bound import PARTICIPANT
from dpscaffold.privacy.goals import Kind, goal_table
from dpscaffold.privacy.showing import digits_up, round_up

SOLVE = ("noise", "rounds", "table")
#: The local steps that a table lists besides the run's own.
LOCAL_STEPS = (1, 5, 10, 20, 50)


def calibrate(
    source: Source = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="The ε to keep.")] = None,
    advantage: Annotated[
        float | None,
        typer.Option(
            "--advantage",
            help="Instead of ε: the largest advantage (TPR − FPR) of any membership test.",
        ),
    ] = None,
    tpr: Annotated[
        float | None,
        typer.Option(
            "--tpr", help="Instead of ε: the largest true-positive rate of any test at --at-fpr."
        ),
    ] = None,
    at_fpr: Annotated[
        float | None, typer.Option("--at-fpr", help="The false-positive rate of --tpr.")
    ] = None,
    mu: Annotated[
        float | None, typer.Option("--mu", help="Instead of ε: approximate Gaussian privacy μ.")
    ] = None,
    group: Annotated[
        int,
        typer.Option("--group", help="Keep the goal for this many records of one person together."),
    ] = 1,
    view: Annotated[
        str,
        typer.Option(
            "--view", help="Adversary: server, third-party, participant or paper-third-party."
        ),
    ] = "server",
    colluders: Colluders = None,
    solve: Annotated[
        str,
        typer.Option(
            "--solve", help="What to solve for: noise, rounds, or a table of (K, T, σ_g)."
        ),
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
    """Find the smallest noise, or the largest number of rounds, for an ε or another goal.

    Example: dpscaffold calibrate clinics.toml --epsilon 1
    """
    goal = goal_from(epsilon, advantage, tpr, at_fpr, mu, group)
    if solve not in SOLVE:
        raise PrivacyError("unknown-choice", f"--solve is {solve!r}; give noise, rounds or table")
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
    if goal.kind != "epsilon" or goal.group > 1:
        answer |= solve_goal(run, goal, bound, costs, solve)
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


def _listed(run: Mechanism) -> list[int]:
    """The local steps that a table lists: some usual ones, and the run's own."""
    return sorted({*LOCAL_STEPS, run.local_steps})


def goal_from(
    epsilon: float | None,
    advantage: float | None,
    tpr: float | None,
    at_fpr: float | None,
    mu: float | None,
    group: int,
) -> AttackGoal:
    """The one goal that the options give.

    >>> goal_from(None, None, 0.02, 0.01, None, 1).kind
    'tpr'
    """
    given: dict[Kind, float | None] = {
        "epsilon": epsilon,
        "advantage": advantage,
        "tpr": tpr,
        "mu": mu,
    }
    named = [kind for kind, value in given.items() if value is not None]
    if not named:
        raise PrivacyError(
            "missing-argument",
            "missing --epsilon; give the budget, a number above 0, or --advantage, --mu, or --tpr "
            "with --at-fpr",
        )
    if len(named) > 1:
        raise PrivacyError(
            "conflicting-arguments", f"--{named[0]} and --{named[1]} are both given; give one goal"
        )
    if (tpr is None) != (at_fpr is None):
        one, other = ("--tpr", "--at-fpr") if at_fpr is None else ("--at-fpr", "--tpr")
        raise PrivacyError("missing-argument", f"{one} is given without {other}; give both")
    target = given[named[0]]
    assert target is not None
    return AttackGoal(named[0], target, at_fpr, group)


def solve_epsilon(
    run: Mechanism, epsilon: float, bound: Bound, costs: tuple[Any, ...], solve: str
) -> dict[str, Any]:
    """The noise or the rounds that keep to a budget of ``epsilon``, or a table of both."""
    if solve == "table":
        table = budget_table(run, epsilon, bound, _listed(run), costs=costs)
        return {"combinations": [asdict(row) for row in table], "delta": run.delta}
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


def solve_goal(
    run: Mechanism, goal: AttackGoal, bound: Bound, costs: tuple[Any, ...], solve: str
) -> dict[str, Any]:
    """The noise or the rounds that meet a goal in human terms, and what they reach."""
    if solve == "table":
        rows = [asdict(row) for row in goal_table(run, goal, bound, costs, _listed(run))]
        return {"combinations": rows, "goal": asdict(goal), "delta": run.delta}
    if solve == "noise":
        run = replace(run, noise=noise_for(run, goal, bound, costs))
    else:
        run = replace(run, rounds=rounds_for(run, goal, bound, costs))
    return {
        "noise": run.noise,
        "rounds": run.rounds,
        "goal": asdict(goal),
        "reached": goal.of(run, bound, costs),
        "epsilon": bound.epsilon(run, costs=costs),
        "delta": run.delta,
        "human": human_terms(bound, run, None, tuple(costs)).to_json(),
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
    if solve in ("noise", "table") and numbers.noise is None:
        numbers = replace(numbers, noise=1.0)
    if solve == "table" and numbers.local_steps is None:
        numbers = replace(numbers, local_steps=LOCAL_STEPS[0])
    if solve == "rounds" and numbers.rounds is None:
        numbers = replace(numbers, rounds=1)
    return StatementSubject(from_numbers(numbers, delta))


def _show(answer: dict[str, Any], console: Console) -> None:
    if "combinations" in answer:
        table = Table("K", "T", "σ_g", "epsilon", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in answer["combinations"]:
            table.add_row(
                str(row["local_steps"]),
                str(row["rounds"]),
                digits_up(row["noise"], 6),
                round_up(row["epsilon"]),
            )
        console.print(table)
    else:
        key = answer["solve"]
        console.print(
            f"{key} = {digits_up(answer[key], 6)}" if key == "noise" else f"{key} = {answer[key]}",
            highlight=False,
        )
    reached = (
        f"epsilon = {round_up(answer['epsilon'])} of {answer['target']:g}, "
        if "epsilon" in answer and "goal" not in answer
        else ""
    )
    if "reached" in answer:
        goal = AttackGoal(**answer["goal"])
        together = f" for {goal.group} together" if goal.group > 1 else ""
        console.print(
            f"{goal.kind} = {digits_up(answer['reached'], 4)} of {goal.target:g}{together}",
            highlight=False,
        )
        console.print(answer["human"]["sentence"], highlight=False)
        reached = f"epsilon = {round_up(answer['epsilon'])}, "
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
