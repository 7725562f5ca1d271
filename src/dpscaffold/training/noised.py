"""Personal models by noised steps, after a run and within its result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dpscaffold.config.personal import PersonalSettings
from dpscaffold.errors import BadInput
from dpscaffold.models.noised import (
    NAME,
    NoisedSteps,
    composed,
    noised_models,
    released,
    steps_after,
)
from dpscaffold.models.personal import NOISED
from dpscaffold.privacy.further import with_further
from dpscaffold.privacy.statement_types import Statement
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.written import plain
from dpscaffold.setting import Setting
from dpscaffold.training.result import Result

#: The composed statement of a run folder's noised personal models.
STATEMENT = "personal-privacy.json"


def refuse_noised(setting: Setting, budget_file: str | Path | None) -> None:
    """Refuse noised personal models that could not be accounted, before anything is spent."""
    run = setting.mechanism
    if run is None:
        raise BadInput(
            "no-privacy",
            "personal.noised is true, and the run has no [privacy], so noise on its model gives no "
            "guarantee; add [privacy], or leave personal.noised out",
        )
    if budget_file is not None:
        raise BadInput(
            "not-applicable",
            f"personal.noised is true, and the run spends from {budget_file}, in which the steps "
            f"would not be counted; leave one out",
        )
    steps_after(run, 1, 1.0, setting.roster.declared)


def with_noised(result: Result, personal: PersonalSettings) -> Result:
    """The result with noised personal models of all users and their composed statement. Those of a
    run folder are made once: made again they would be another release. Their statement follows the
    run's, which has more rounds if it was extended."""
    own = None if result.folder is None else _kept(result.folder)
    if own is not None and result.folder is not None:
        said = with_further(result.privacy, released(result.folder))
        _write_statement(result.folder, said)
        return replace(result, own=own, composed=said)
    run, setting = result.privacy.run, result.setting
    if run is None or personal.epsilon is None or not result.privacy.guarantee:
        raise BadInput(
            "no-privacy",
            f"personal.noised is true, and the run has no guarantee ({result.privacy.reason})",
        )
    shape = (personal.epsilon, setting.roster.declared, personal.steps, personal.step_size)
    given = [steps_after(run, size, *shape) for size in setting.roster.sizes]
    said = _stated(result, max(given, key=lambda one: one.spent))
    own = noised_models(result.model, result.federation, given)
    if result.folder is not None:
        save_file({"personal": own}, result.folder / NOISED)
        _write_statement(result.folder, said)
    return replace(result, own=own, composed=said)


def _stated(result: Result, worst: NoisedSteps) -> Statement:
    """The statement, in the journal of the run's model first. The records of users are disjoint, so
    the largest ε of a user counts."""
    if result.folder is None:
        return with_further(result.privacy, [worst.release])
    return composed(result.model, worst, result.folder, f"{NAME} of every user")


def _write_statement(folder: Path, said: Statement) -> None:
    text = json.dumps(plain(said.to_json()), indent=2)
    RunFolder(folder).write_text(STATEMENT, text + "\n")


def _kept(folder: Path) -> torch.Tensor | None:
    said = RunFolder(folder).read_json(STATEMENT)
    if said is None or not (folder / NOISED).exists():
        return None
    return load_file(folder / NOISED)["personal"]
