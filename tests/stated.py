"""What the commands answer, and the statements that they print and write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from dpscaffold.cli import app
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Cost, Ledger, Mechanism, Statement, adversaries, epsilon, page
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.journal import Journal


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's journal that are about rounds."""
    return [line for line in Journal(folder / "ledger.jsonl").lines() if "round" in line]


def call(*arguments: str) -> Result:
    """A command, on a wide screen."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def answer(*arguments: str) -> Any:
    """What a command prints as JSON."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    """The sentence of the error; the program's entry prints it and exits with status 2."""
    result = call(*arguments)
    assert isinstance(result.exception, BadInput), result.output
    message = str(result.exception)
    assert "\n" not in message
    return message


def read(values: Any) -> Statement:
    """A statement from JSON values."""
    return Statement.from_json(values, "what was stated")


def stated(*sources: Any) -> Statement:
    """What ``dpscaffold privacy`` says of runs or plans; options are passed on."""
    return read(answer("privacy", *map(str, sources)))


def written(folder: Path) -> Statement:
    """The statement of a run folder."""
    found = RunFolder(folder).statement()
    assert found is not None
    return found


def over_draw(
    run: Mechanism, rounds: int | None = None, costs: Sequence[Cost] = (), again: int = 0
) -> float:
    """ε towards the server over the draw, some rounds having been run again."""
    run = replace(run, extra=run.extra + again)
    return epsilon(run, adversaries(run)["server"], rounds, costs=costs)


def spent(run: Mechanism, times: int, user: int = 0, costs: Sequence[Cost] = ()) -> float:
    """ε of a user that took part this often, towards the server."""
    return Ledger(run, costs=costs).of(user, more=times)


def at_most(run: Mechanism, times: int | None = None, costs: Sequence[Cost] = ()) -> float:
    """ε towards the server if everybody takes part in every round, or this often."""
    times = run.rounds + run.extra if times is None else times
    return epsilon(run, adversaries(run)["server"], times=times, costs=costs)


def unnamed(said: Statement) -> Statement:
    """What is stated, whatever the run is called."""
    parts = tuple(replace(part, name="") for part in said.parts)
    return replace(said, parts=parts)


def check_told_alike(folder: Path) -> None:
    """The file in a run folder says what the command answers."""
    assert unnamed(written(folder)) == unnamed(stated(folder))


def page_of(folder: Path) -> str:
    """The statement of a run folder as people read it."""
    return page(written(folder))


def summary_of(folder: Path) -> dict[str, Any]:
    """How a run ended, as the last line of its metrics says."""
    said = RunFolder(folder).summary().to_json()
    return {**said, **said.pop("metrics", {})}


def described(folder: Path) -> dict[str, Any]:
    """What a run folder says of the run besides its configuration."""
    return dict(RunFolder(folder).described)
