"""Run an experiment of the paper and write its folder: results, figure and RESULT.md."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from dpscaffold.checks import number, whole
from dpscaffold.errors import BadInput
from dpscaffold.paper.archive import Archive
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment
from dpscaffold.paper.runner import Loader, run_cases, user_steps
from dpscaffold.training.events import Listener, Writing, silence


@dataclass(frozen=True)
class ReproduceRequest:
    """How an experiment is to be run.

    ``seeds`` and ``scale`` make it smaller, and ``rows`` limits it to rows of those labels.
    ``data_dir`` is the folder of the datasets, if it is not the usual.
    """

    out: Path
    seeds: int | None = None
    scale: float = 1.0
    device: str = "cpu"
    rows: tuple[str, ...] = ()
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.seeds is not None:
            whole("--seeds", self.seeds, 1)
        if not 0 < number("--scale", self.scale) <= 1:
            raise BadInput(
                "out-of-range",
                f"--scale is {self.scale:g}; it must lie in (0, 1], 1 being the paper's size",
            )
        if self.out.exists() and not self.out.is_dir():
            raise BadInput("not-a-folder", f"--out is {self.out}, which is a file; name a folder")

    def command(self, name: str) -> str:
        """The command that makes this, wherever its folder is."""
        parts = ["dpscaffold reproduce", name]
        if self.seeds is not None:
            parts.append(f"--seeds {self.seeds}")
        if self.scale != 1:
            parts.append(f"--scale {self.scale:g}")
        parts += [f'--row "{row}"' for row in self.rows]
        if self.device != "cpu":
            parts.append(f"--device {self.device}")
        return " ".join(parts)

    def seeds_of(self, experiment: Experiment) -> int:
        """The seeds asked for, else the experiment's, fewer at a small scale."""
        if self.seeds is not None:
            return self.seeds
        return max(1, round(self.scale * experiment.seeds))


def chosen_cases(
    experiment: Experiment, request: ReproduceRequest
) -> tuple[list[Case], list[Case]]:
    """The runs and the runs of the cross-validation that a request asks for."""
    if request.rows:
        known = [row.label for row in experiment.rows]
        for row in request.rows:
            if row not in known:
                raise BadInput(
                    "unknown-row",
                    f"--row is {row!r}; {experiment.name} has the rows "
                    f"{', '.join(map(repr, known))}",
                )
        experiment = replace(
            experiment, rows=tuple(row for row in experiment.rows if row.label in request.rows)
        )
    cases = experiment.cases(request.seeds_of(experiment), request.scale)
    return cases, experiment.folded(request.scale)


Show = Callable[[str, float], AbstractContextManager[Listener]]


def reproduce(
    experiment: Experiment,
    request: ReproduceRequest,
    device: torch.device,
    show: Show | None = None,
) -> list[str]:
    """Run what is missing, then write the experiment's folder; the names of the files in it.

    ``show(name, work)`` gives the listener of progress events.
    """
    cases, folded = chosen_cases(experiment, request)
    archive = Archive(request.out, experiment.name)
    todo = {case.digest: case for case in [*cases, *folded] if case not in archive}
    show = show or (lambda name, work: nullcontext(silence))
    with show(experiment.name, float(sum(map(user_steps, todo.values())))) as tell:
        loader = Loader(data_dir=request.data_dir)
        run = partial(run_cases, archive=archive, device=device, tell=tell, loader=loader)
        run(cases, optimum=experiment.optimum)
        run(folded)
        tell(Writing())
        return write(experiment, request, cases, folded, archive, loader)


def write(
    experiment: Experiment,
    request: ReproduceRequest,
    cases: list[Case],
    folded: list[Case],
    archive: Archive,
    loader: Loader,
) -> list[str]:
    """The tidy results, the figure and RESULT.md of what is finished."""
    from dpscaffold.paper.figures import draw
    from dpscaffold.paper.result_page import title, write_result
    from dpscaffold.paper.results import Results, write_tidy
    from dpscaffold.paper.summary import SOURCES, draw_summary
    from dpscaffold.paper.text import Provenance

    results = Results(experiment, cases, folded, archive)
    if not results.runs:
        raise BadInput(
            "no-finished-run",
            f"{archive.folder} holds no finished run of {experiment.name} yet; run it first",
        )
    folder = archive.folder
    folder.mkdir(parents=True, exist_ok=True)
    made = Provenance(
        request.command(experiment.name),
        request.scale,
        _optima(cases, request.scale, loader),
        request.rows,
    )
    written = [write_tidy(results.tidy(), folder)]
    written += draw(results, folder, title(experiment, request.scale, request.rows))
    if experiment.name in SOURCES:
        written += draw_summary(request.out)
    return [*written, write_result(results, folder, made)]


def _optima(cases: list[Case], scale: float, loader: Loader) -> dict[tuple[str, float], float]:
    """Test accuracy of x* of every distinct objective on synthetic data: by ``[data]`` table and λ.

    Without ℓ2 the solver needs minutes, which a scaled-down version does not spend.
    """
    found: dict[tuple[str, float], float] = {}
    for case in filter(_solvable, cases):
        objective = case.objective
        if objective not in found and (scale == 1 or objective[1] > 0):
            best = loader.optimum(case)
            accuracy = None if best is None else best.metrics.get("test_accuracy")
            if accuracy is not None:
                found[objective] = accuracy
    return found


def _solvable(case: Case) -> bool:
    settings = case.settings
    return settings.data.source == "synthetic" and settings.task.kind == "logistic"
