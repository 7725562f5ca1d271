"""What private tuning found: the winner in a folder that may be published, and what the server
saw next to it."""

from __future__ import annotations

import json
from pathlib import Path

from dpscaffold.atomic import atomic_file, write_text
from dpscaffold.errors import BadInput
from dpscaffold.models.model import Model
from dpscaffold.models.trained import Origin
from dpscaffold.privacy.numbers import digits_up, round_up
from dpscaffold.runs.written import plain, to_toml
from dpscaffold.tasks.metrics import titled
from dpscaffold.tuning.private_tuning import PrivateTuningResult, as_lines


def shown_winner(tuned: PrivateTuningResult) -> str:
    """The winner in a sentence."""
    winner = tuned.winner
    if winner.model is None:
        return (
            f"No trial gave a model: {as_lines(winner.values)} is the first point of tune.grid, "
            f"and nothing was learnt about it."
        )
    return (
        f"Chosen privately: {as_lines(winner.values)}, "
        f"{titled(tuned.compared.metric.name)} {winner.score:.4f}{_noise(tuned)} on "
        f"{tuned.scored_on}."
    )


def _noise(tuned: PrivateTuningResult) -> str:
    return "" if tuned.tune.score_noise is None else " (with its noise)"


def refuse_earlier(folder: Path) -> None:
    """A folder keeps one private tuning: what an earlier one cost must not be written over."""
    for name in ("server.json", "winner"):
        if (folder / name).exists():
            raise BadInput(
                "tuning-exists",
                f"--out is {folder}, which holds a private tuning; its epsilon adds to that of "
                f"another, so it is kept: name another folder",
            )


def write_private_tuning(tuned: PrivateTuningResult, folder: Path) -> list[str]:
    """``winner/`` with ``best.toml``, ``winner.json`` and the model that won, and ``server.json``
    with every trial, readable by its owner alone."""
    winner = folder / "winner"
    winner.mkdir(parents=True, exist_ok=True)
    note = f"# {shown_winner(tuned)}\n# {_outside(tuned)}\n\n"
    write_text(winner / "best.toml", note + to_toml(tuned.best_tables()))
    write_text(winner / "winner.json", _json(tuned.released()))
    if tuned.winner.model is not None:
        _model(tuned).save(winner / "model")
    with atomic_file(folder / "server.json") as partial:
        partial.touch(mode=0o600)
        partial.write_text(_json(tuned.seen_by_server()), encoding="utf-8")
    return ["winner", "server.json"]


def _outside(tuned: PrivateTuningResult) -> str:
    return (
        f"Given this alone, epsilon = {round_up(tuned.privacy.winner)} at delta = "
        f"{digits_up(tuned.privacy.trials.delta)}; "
        f"training again with it is a further run, whose epsilon adds."
        + "".join(f" Outside the guarantee: {one}" for one in tuned.outside)
    )


def _model(tuned: PrivateTuningResult) -> Model:
    from dpscaffold.tuning.tuning import with_values

    assert tuned.winner.model is not None
    settings = with_values(tuned.settings, tuned.winner.values)
    task = settings.task.build(tuned.federation)
    origin = Origin(data=tuned.federation.title)
    return Model.of(tuned.federation, task, tuned.winner.model, tuned.statement(), origin)


def _json(content: object) -> str:
    return json.dumps(plain(content), indent=2, ensure_ascii=False) + "\n"
