"""train(): plan → engine → rounds → metrics → checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpscaffold.algorithms import Algorithm
from dpscaffold.checks import instance
from dpscaffold.config import Run, make_run
from dpscaffold.config.gaussian import Gaussian, overruled
from dpscaffold.config.plan import Plan
from dpscaffold.config.secure import Secure
from dpscaffold.engines import Hardware
from dpscaffold.engines.ranks import Ranks
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.models.model import Model
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.tasks import Task
from dpscaffold.tasks.fitting import require_task
from dpscaffold.training.distributed import RankedRun, join, leads, own_hardware, together
from dpscaffold.training.evaluator import OPTIMUM
from dpscaffold.training.events import CallbackListener, Listener, ListenerList, silence
from dpscaffold.training.in_progress import OwnMetric, RunInProgress
from dpscaffold.training.optimum import require_convex, solve
from dpscaffold.training.progress import Progress
from dpscaffold.training.result import Result
from dpscaffold.training.stopping import Stopping

Observer = Callable[[int, HistoryRow], None]


def train(
    federation: Federation,
    task: Task,
    algorithm: Algorithm,
    plan: Plan,
    privacy: Gaussian | None = None,
    *,
    secure: Secure | None = None,
    engine: str = "simulator",
    device: str = "cpu",
    out: Path | str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    listener: Listener | None = None,
    config: Mapping[str, Any] | None = None,
    chunk: int | None = None,
    progress: bool = False,
    metrics: Sequence[str | OwnMetric] = (),
    stopping: Stopping | None = None,
    release: bool | Sequence[str] = False,
    data_key: Path | str | None = None,
    distributed: bool = False,
) -> Result:
    """Train one model and return what happened.

    With ``out`` everything is written to a run folder, from which ``resume=True`` continues: the
    result is the same, number for number, as without the interruption. SIGINT and SIGTERM finish
    the round, save a checkpoint and return with ``ended="interrupted"``.

    Args:
        federation: The users and their records.
        task: The model and its loss, such as ``Logistic(features, classes)``.
        algorithm: The federated algorithm, such as ``scaffold()``.
        plan: Rounds, local steps, sampling rates and step sizes.
        privacy: Clipping, noise and limits of what may be spent; None trains without privacy.
        secure: Let the server see sums of uploads only, such as ``Secure(colluders=1)``.
        engine: ``"simulator"`` (fast), or ``"loop"`` (the slow reference implementation).
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
        out: The run folder to write; None writes nothing.
        resume: Continue the run in ``out``.
        observer: Called as ``observer(round, row)`` after every round with its metrics; they are
            few between evaluations, which happen every ``plan.evaluate_every`` rounds.
        listener: Called with every event (:mod:`~dpscaffold.training.events`); those of rounds
            carry the parameters.
        config: Tables of a configuration to store with the run.
        chunk: The number of users that are computed at once; None chooses it.
        progress: Show a live line, in notebooks too.
        metrics: Names (:data:`~dpscaffold.tasks.metrics.METRICS`), or functions that are called
            with the model and the federation. ``"optimum"`` adds the distance to the central
            optimum x*, and ``"dissimilarity"`` how far apart the users' gradients are: always
            measured for a convex task, and most of the time of an evaluation for a network.
        stopping: Ends the run early by a public validation set; ε is that of all planned rounds.
        release: Train a model to publish (:mod:`~dpscaffold.config.release`): noise and sampling
            from the operating system, and a refusal of what the guarantee would not cover. A list
            names refusals that are overruled.
        data_key: A file with a key, made if it is missing. Runs with the same key file can be
            compared as being over the same records; others count as such.
        distributed: Share the run with the other processes of the process group. Every process
            calls this function with the same arguments; rank 0 alone writes and shows progress.

    Returns:
        The model, its metrics and its privacy statement.

    >>> from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic, train
    >>> federation = synthetic(alpha=1, beta=1, users=10, records=100)
    >>> result = train(federation, Logistic(40, 10), scaffold(), Plan(rounds=4, local_steps=5),
    ...                Gaussian(clip=1.0, noise=2.0))
    >>> result.ended, result.rounds, sorted(result.final)[:2]
    ('completed', 4, ['control_norm', 'epsilon_server'])
    """
    ranks = join(device, distributed)
    with together(ranks):
        _check_types(
            task,
            federation=federation,
            algorithm=algorithm,
            plan=plan,
            privacy=privacy,
            secure=secure,
            stopping=stopping,
            out=out,
        )
        if isinstance(metrics, str):
            raise BadInput(
                "not-a-list", f"metrics is '{metrics}'; give a list: metrics=['{metrics}']"
            )
        privacy = _released(privacy, overruled(release))
        allowed = None if privacy is None else privacy.allowed
        if out is None:
            require_folder(allowed is not None, None if privacy is None else privacy.budget_file)
        data = federation if federation.mapped else federation.validated()
        setting = make_run(data.roster, task, algorithm, plan, privacy, secure)
        setting = continued(setting, out, resume)
        if allowed is not None:
            config = _for_release(setting, data, config, allowed)
        listeners = (CallbackListener(observer) if observer else silence, listener or silence)
        shown = progress and leads(ranks)
        with Progress(setting.label, plan.rounds, quiet=not shown) as line:
            return run(
                setting,
                data,
                own_hardware(device, ranks, chunk),
                engine=engine,
                out=out,
                resume=resume,
                listener=ListenerList((*listeners, line)),
                config=config,
                metrics=metrics,
                stopping=stopping,
                allowed=allowed,
                data_key=data_key,
                ranks=ranks,
            )


#: What each argument of :func:`train` is, and an example of it.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "federation": (Federation, "a Federation, such as federation_of(frame, label='outcome', …)"),
    "algorithm": (Algorithm, "an algorithm, such as scaffold()"),
    "plan": (Plan, "a plan, such as Plan(rounds=100)"),
    "privacy": (Gaussian, "Gaussian(clip=1.0, epsilon=2.0), or None for a run without privacy"),
    "secure": (Secure, "Secure(colluders=1), or None where the server sees every upload"),
    "stopping": (Stopping, "Stopping('public.csv', label='outcome')"),
    "out": ((str, Path), "the path of a run folder"),
}


def _check_types(task: object, **given: object) -> None:
    """Refuse, in a sentence, what a first call often gets wrong."""
    for name, value in given.items():
        if value is not None or name in ("federation", "algorithm", "plan"):
            instance(name, value, *_KINDS[name])
    require_task(task)


def require_folder(released: bool, budget_file: str | None) -> None:
    """Refuse, where no run folder is named, a run whose ledger must be kept."""
    if released:
        raise BadInput(
            "no-run-folder",
            "a release is asked for without a run folder, which keeps its ledger and its privacy "
            "statement; name one, such as out='runs/release'",
        )
    if budget_file is not None:
        raise BadInput(
            "no-run-folder",
            f"privacy.budget_file is '{budget_file}', and a run takes from it only with a run "
            f"folder, which keeps its ledger; name one, such as out='runs/first'",
        )


def continued(setting: Run, out: Path | str | None, resume: bool) -> Run:
    """The setting with the step size that the run in the folder began with, where nobody gives
    one: that of more rounds would be chosen smaller."""
    begun = RunFolder(Path(out)).rate if resume and out is not None else None
    if begun is None or setting.plan.learning_rate is not None:
        return setting
    return replace(setting, plan=setting.plan.changed(learning_rate=begun))


def run(
    setting: Run,
    federation: Federation,
    hardware: Hardware | None = None,
    *,
    engine: str = "simulator",
    out: Path | str | None = None,
    resume: bool = False,
    listener: Listener = silence,
    config: Mapping[str, Any] | None = None,
    metrics: Sequence[str | OwnMetric] = (),
    stopping: Stopping | None = None,
    allowed: tuple[str, ...] | None = None,
    home: str | None = None,
    data_key: Path | str | None = None,
    ranks: Ranks | None = None,
) -> Result:
    """As :func:`train`, for a setting that is made already and the federation that it is of.

    ``allowed`` is what a release, made by :mod:`~dpscaffold.config.release`, may overlook;
    None where nothing is released. ``ranks`` are the processes that share the run; None for one.
    """
    if federation.roster.sizes != setting.roster.sizes:
        raise BadInput(
            "setting-mismatch",
            f"the setting is of {setting.roster.users} users and their sizes, and the federation "
            f"{federation.title!r} has others, so its cost would not be what is accounted; make "
            f"the setting of federation.roster",
        )
    if OPTIMUM in metrics:
        require_convex(setting.task)
    going = _in_progress(
        ranks, setting, federation, hardware or Hardware(), engine, listener, metrics
    )
    if isinstance(going, RankedRun) and not leads(ranks):
        return going.serve()
    if stopping is not None:  # rows that do not fit are refused before anything is released
        first = setting.task.initial(setting.plan.public_seed)
        stopping.value(Model.of(federation, setting.task, first))
    going.stopping, going.accounts.allowed, going.home = stopping, allowed, home
    going.data_key = Path(data_key) if data_key is not None else None
    try:
        going.open(Path(out) if out is not None else None, resume, config)
        strength = setting.plan.regularisation
        best = solve(federation, setting.task, strength) if OPTIMUM in metrics else None
        return going.go(best)
    finally:
        going.close()


def _in_progress(ranks: Ranks | None, *given: Any) -> RunInProgress:
    """The run, at this process; ranks that differ are refused."""
    return RunInProgress(*given) if ranks is None else RankedRun.on(ranks, *given)


def _released(privacy: Gaussian | None, allow: Sequence[str] | None) -> Gaussian | None:
    """The privacy of a release with these exceptions; None where nothing more is asked for."""
    if allow is None:
        return privacy
    if privacy is None:
        raise BadInput(
            "no-privacy",
            "release is asked for without privacy; give a mechanism, such as Gaussian(epsilon=2.0)",
        )
    return privacy.changed(release=list(allow) or True)


def _for_release(
    setting: Run, data: Federation, config: Mapping[str, Any] | None, allow: Sequence[str]
) -> dict[str, Any]:
    """The configuration of a release, which says that it is one; refuses what cannot be one."""
    from dpscaffold.config.release import check_release

    check_release(setting, data)
    described = setting.to_dict() if config is None else dict(config)
    recipe = {"secret": True, "release": list(allow) or True}
    return {**described, "privacy": {**described.get("privacy", {}), **recipe}}
