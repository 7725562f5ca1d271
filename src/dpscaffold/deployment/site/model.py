"""The model that a site keeps of a finished run, for its own use."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.server.agreed import model_on, roster_of
from dpscaffold.deployment.site.file import read_site_file
from dpscaffold.deployment.site.ledger import SiteLedger
from dpscaffold.deployment.site.memory import RunMemory
from dpscaffold.deployment.site.work import accepted_names
from dpscaffold.errors import BadInput
from dpscaffold.models.model import Model
from dpscaffold.models.trained import Origin


def finished_run(state: Path, run: str | None) -> RunMemory:
    """The memory of a finished run: the one named, or the latest."""
    finished = [
        path
        for path in sorted((state / "runs").glob("*/model.box"), key=os.path.getmtime)
        if (run is None or path.parent.name == run) and not _fits_preparation(path.parent)
    ]
    if not finished and run is not None:
        raise BadInput(
            "no-finished-run",
            f"--run is {run!r}, and no run of that id is over here; leave it out for the latest",
        )
    if not finished:
        raise BadInput(
            "no-finished-run",
            "no run that is over is known here; a model arrives at the end of a run",
        )
    return RunMemory(finished[-1].parent)


def _fits_preparation(folder: Path) -> bool:
    """Whether a run only fitted preparation, so that it has no model."""
    known = RunMemory(folder).enrolment()
    return known is not None and "fit" in known.offer


def stored_model(path: Path, run: str | None) -> Model:
    """The model of a finished run, with the columns and classes of its plan.

    It carries no privacy statement: what the run promises for the records of all sites is known at
    the server (``privacy.md`` in the run folder), and this site's own ε is in its ledger.
    """
    file = read_site_file(path)
    memory = finished_run(file.state, run)
    try:
        known, found = memory.enrolment(), memory.model()
        if known is None or found is None:
            raise BadInput("run-damaged", f"{memory.folder} lacks a file of the run")
        offer = accepted_names(known.offer, file.policy)
        ledger = SiteLedger(file.state / "ledger.jsonl", file.name)
    except Refused as no:
        raise BadInput(no.code, f"the model cannot be read: {no}") from no
    enrolled = EnrolledRun(known.run, known.offer, known.roster, "", known.sizes)
    roster, task = roster_of(offer, enrolled), offer.build_task()
    params = torch.from_numpy(found.vectors["params"].copy()) if found.vectors else torch.empty(0)
    if params.shape != (task.parameters,):
        raise BadInput(
            "run-damaged",
            f"the model in {memory.folder} has {len(params)} numbers, and its plan has "
            f"{task.parameters}; ask for the model at the server",
        )
    booking = ledger.runs.get(known.run)
    rounds = booking.last_round if booking else 0
    origin = Origin(offer.algorithm.name, roster.title, rounds, offer.rows.label)
    return model_on(offer.rows, roster, task, params, origin)
