"""``dpscaffold calibrate``: the noise, the rounds, or the combinations that spend a given ε."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dpscaffold.cli.privacy import (
    AlgorithmName,
    Cap,
    DataRatio,
    Delta,
    LocalSteps,
    Noise,
    Records,
    Rounds,
    Sampling,
    Source,
    Unit,
    UserRatio,
    Users,
    from_numbers,
    from_source,
)
from dpscaffold.privacy import (
    PrivacyError,
    Run,
    bound_for,
    budget_table,
    calibrate_noise,
    largest_rounds,
)
from dpscaffold.privacy.statement import round_up

SOLVE = ("noise", "rounds", "table")


def calibrate(
    source: Source = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="the budget")] = None,
    view: Annotated[
        str, typer.Option("--view", help="server, third-party or paper-third-party")
    ] = "server",
    solve: Annotated[
        str, typer.Option("--solve", help="noise, rounds, or table: (K, T, σ_g) on the budget")
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
    delta: Delta = None,
    max_participations: Cap = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the answer as JSON")] = False,
) -> None:
    """Solve for the noise, or the largest number of rounds, whose ε is at most the budget."""
    if epsilon is None:
        raise PrivacyError("missing --epsilon; give the budget, a number above 0")
    if solve not in SOLVE:
        raise PrivacyError(f"--solve is {solve!r}; give noise, rounds or table")
    numbers: dict[str, Any] = {
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
        "max_participations": max_participations,
    }
    run, costs = _run(source, numbers, delta, solve)
    bound = bound_for(
        run, view, draw_hidden=source is None
    )  # a configuration holds the seed of the draw
    answer: dict[str, Any] = {
        "solve": solve,
        "view": view.replace("-", "_"),
        "bound": bound.name,
        "target": epsilon,
    }
    if solve == "noise":
        run = replace(run, noise=calibrate_noise(run, epsilon, bound, costs))
        answer |= {
            "noise": run.noise,
            "rounds": run.rounds,
            "epsilon": bound.epsilon(run, costs=costs),
            "delta": run.delta,
        }
    elif solve == "rounds":
        run = replace(run, rounds=largest_rounds(run, epsilon, bound, costs=costs))
        answer |= {
            "rounds": run.rounds,
            "noise": run.noise,
            "epsilon": bound.epsilon(run, costs=costs),
            "delta": run.delta,
        }
    else:
        answer |= {
            "combinations": [asdict(row) for row in budget_table(run, epsilon, bound, costs=costs)],
            "delta": run.delta,
        }
    if as_json:
        typer.echo(json.dumps(answer, indent=2, allow_nan=False))
    else:
        _show(answer, Console())


def _run(
    source: Any, numbers: dict[str, Any], delta: float | None, solve: str
) -> tuple[Run, tuple[Any, ...]]:
    """The run to solve for, and what its data cost already; what is solved for needs no value of
    its own."""
    if source is not None:
        about = from_source(source, numbers, delta)
        if about.run is None:
            raise PrivacyError(f"{source} describes a run without privacy; add a [privacy] table")
        return about.run, about.extra_costs
    if solve in ("noise", "table") and numbers["noise"] is None:
        numbers = {**numbers, "noise": 1.0}
    if solve == "rounds" and numbers["rounds"] is None:
        numbers = {**numbers, "rounds": 1}
    return from_numbers(numbers, delta), ()


def _show(answer: dict[str, Any], console: Console) -> None:
    if "combinations" in answer:
        table = Table("K", "T", "σ_g", "epsilon", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in answer["combinations"]:
            table.add_row(
                str(row["local_steps"]),
                str(row["rounds"]),
                f"{row['noise']:g}",
                round_up(row["epsilon"]),
            )
        console.print(table)
    else:
        key = answer["solve"]
        console.print(
            f"{key} = {answer[key]:g}" if key == "noise" else f"{key} = {answer[key]}",
            highlight=False,
        )
    reached = (
        f"epsilon = {round_up(answer['epsilon'])} of {answer['target']:g}, "
        if "epsilon" in answer
        else ""
    )
    console.print(
        f"{reached}delta = {answer['delta']:.3g}, view {answer['view']}, bound {answer['bound']}",
        highlight=False,
    )
