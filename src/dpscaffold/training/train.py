"""Training from Python: :func:`train` for objects, :func:`run` for a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dpscaffold.algorithms import Algorithm
from dpscaffold.algorithms.naming import own_failures
from dpscaffold.checks import instance
from dpscaffold.config import Configuration, Run, load, make_run
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.config.secure import Secure
from dpscaffold.engine import Engine, Loop, State
from dpscaffold.engine.device import device_failed, stop_signals
from dpscaffold.engine.distributed import join, together
from dpscaffold.errors import BadInput, DeviceLost, RankLost
from dpscaffold.federation import Federation
from dpscaffold.federation.share import UserShare, user_ranges
from dpscaffold.models.model import Model
from dpscaffold.models.personal import JOINING, Strength, own_models
from dpscaffold.privacy.page import Statement
from dpscaffold.privacy.seeds import public_seed
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import MetricValues
from dpscaffold.runs.ledger import WITHIN
from dpscaffold.runs.written import plain
from dpscaffold.tasks import Task
from dpscaffold.tasks.fitting import require_task
from dpscaffold.training.evaluator import OPTIMUM, Evaluator
from dpscaffold.training.opening import Asked, OwnMetric, begun, check_same
from dpscaffold.training.optimum import Optimum, solve
from dpscaffold.training.progress import live_line
from dpscaffold.training.result import Result, summarise
from dpscaffold.training.stopping import Stopping
from dpscaffold.training.training import Ending, Evaluate, OnRound, Training, ignore

#: Receives what was read and what will be run, one sentence at a time.
Say = Callable[[str], None]

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
    on_round: OnRound = ignore,
    chunk: int | None = None,
    progress: bool = False,
    metrics: Sequence[str | OwnMetric] = (),
    stopping: Stopping | None = None,
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
        on_round: Called as ``on_round(row)`` after every round, with its number and its metrics;
            they are few between evaluations, which happen every ``plan.evaluate_every`` rounds.
        chunk: The number of users that are computed at once; None chooses it.
        progress: Show a live line, in notebooks too.
        metrics: Names (:data:`~dpscaffold.tasks.metrics.METRICS`), or functions that are called
            with the model and the federation. ``"optimum"`` adds the distance to the central
            optimum x*, and ``"dissimilarity"`` how far apart the users' gradients are: always
            measured for a convex task, and most of the time of an evaluation for a network.
        stopping: Ends the run early by a public validation set; ε is that of all planned rounds.
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
    comm = join(device, distributed)
    with together(comm):
        given = {"federation": federation, "algorithm": algorithm, "plan": plan}
        limits = {"privacy": privacy, "secure": secure, "stopping": stopping, "out": out}
        given |= {name: value for name, value in limits.items() if value is not None}
        for name, value in given.items():
            instance(name, value, *_KINDS[name])
        require_task(task)
        if isinstance(metrics, str):
            raise BadInput(
                "not-a-list", f"metrics is '{metrics}'; give a list: metrics=['{metrics}']"
            )
        data = federation if federation.mapped else federation.validated()
        made = make_run(data.roster, task, algorithm, plan, privacy, secure)
        made = _continued(made, out, resume)
        asked = Asked(
            made,
            data,
            device=comm.on(device),
            chunk=chunk,
            engine=engine,
            out=None if out is None else Path(out),
            resume=resume,
            tables=made.to_dict(),
            metrics=tuple(metrics),
            stopping=stopping,
            data_key=None if data_key is None else Path(data_key),
            on_round=on_round,
            progress=progress and comm.rank == 0,
            comm=comm,
        )
        return trained(asked)


def run(
    config: Path | str | Mapping[str, Any] | Configuration,
    overrides: Sequence[str] = (),
    *,
    out: Path | str | None = None,
    resume: bool = False,
    device: str = "cpu",
    engine: str = "simulator",
    progress: bool = False,
    on_round: OnRound = ignore,
    data_key: Path | str | None = None,
    federation: Federation | None = None,
    say: Say | None = None,
    distributed: bool | None = False,
) -> Result:
    """Train as a configuration says: ``dpscaffold train`` from Python.

    A run folder is written only if ``out`` names one. A release (``privacy.release``) and a run
    with a ``privacy.budget_file`` need one, because it keeps their ledger.

    Args:
        config: A TOML file, or its tables.
        overrides: Keys to change, as ``["plan.rounds=100"]``.
        out: The run folder to write; None writes nothing.
        resume: Continue the run in ``out``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
        engine: ``"simulator"`` (fast), or ``"loop"`` (the slow reference implementation).
        progress: Show a live line.
        on_round: Called after every round with its row, as for :func:`~dpscaffold.train`.
        data_key: A file with a key, as for :func:`~dpscaffold.train`.
        federation: The records, where they are read already.
        say: Called with what was read and what will be run, one sentence at a time.
        distributed: Share the run, as for :func:`~dpscaffold.train`; None: where a launcher
            started several processes.

    >>> result = run({"data": {"users": 5, "records": 40}}, ["plan.rounds=2"])
    >>> result.rounds, result.folder
    (2, None)
    """
    comm = join(device, distributed)
    with together(comm):
        settings = _settings(config, overrides)
        data = federation or _records(settings, say)
        made = settings.setting(data)
        made = _continued(made, out, resume)
        asked = Asked(
            made,
            data,
            device=comm.on(device),
            engine=engine,
            out=None if out is None else Path(out),
            resume=resume,
            tables=settings.resolved(made),
            home=settings.home,
            metrics=tuple(settings.task.metrics or ()),
            stopping=_stopping(settings),
            data_key=None if data_key is None else Path(data_key),
            on_round=on_round,
            progress=progress and comm.rank == 0,
            comm=comm,
        )
        if say is not None:
            say(str(data))
            say(described(made))
        with own_failures(settings.algorithm.name):
            result = trained(asked)
        if settings.personal is None or result.ended == "interrupted" or comm.rank > 0:
            return result
        if say is not None:
            say(f"fitting a local and a personal model for each of {data.users} users")
        return _with_joining(result, settings.personal.strength)


def run_seeds(
    settings: Configuration, folder: Path, count: int, resume: bool = False, **options: Any
) -> list[Path]:
    """The same run with ``count`` seeds, in ``folder/seed-0``, ``seed-1`` and so on, which are
    returned. The data stay the same: they have a seed of their own.

    Runs that are complete are read back where ``resume`` is asked for. ``options`` are those of
    :func:`run`.
    """
    if count < 2:
        raise BadInput(
            "out-of-range", f"--seeds is {count}; give 2 or more, or leave it out for one run"
        )
    privacy = settings.privacy
    if privacy is not None and (privacy.secret or privacy.release):
        raise BadInput(
            "repeated-release",
            f"--seeds is {count}, and the noise is secret: {count} models of the same records "
            f"would be released, whose epsilons add; leave --seeds out, or simulate with --set "
            f"privacy.secret=false",
        )
    first = public_seed(settings.plan.seed)
    federation = _records(settings)
    places = [folder / f"seed-{seed}" for seed in range(first, first + count)]
    for k, place in enumerate(places):
        plan = settings.plan.changed(seed=first + k)
        one = settings.model_copy(update={"plan": plan})
        run(one, out=place, resume=resume, federation=federation, **options)
    return places


# --- before the first round


def _settings(
    config: Path | str | Mapping[str, Any] | Configuration,
    overrides: Sequence[str],
) -> Configuration:
    if isinstance(config, Configuration):
        return config
    instance("config", config, (Path, str, Mapping), "a TOML file or its tables (a dict)")
    if isinstance(overrides, str | Mapping):
        raise BadInput(
            "not-a-list",
            f"overrides is {overrides!r:.60}; give a list, such as ['plan.rounds=100']",
        )
    given = list(overrides)
    return load(None, given, config) if isinstance(config, Mapping) else load(config, given)


def _records(settings: Configuration, say: Say | None = None) -> Federation:
    """The records of a configuration; what reads files is needed by nothing else here."""
    from dpscaffold.data.loading import load_federation

    return load_federation(settings.data, say)


def _stopping(settings: Configuration) -> Stopping | None:
    """What ends the run early, where the configuration asks for it."""
    if settings.stopping is None:
        return None
    label = getattr(settings.data, "label", "label")
    path = Path(settings.stopping.path).expanduser()
    return Stopping(path, label=label if isinstance(label, str) else None)


def _continued(made: Run, out: Path | str | None, resume: bool) -> Run:
    """The run with the step size that the run in the folder began with, where nobody gives one:
    that of more rounds would be chosen smaller."""
    begun = RunFolder(out).plan.get("learning_rate") if resume and out is not None else None
    if begun is None or made.plan.learning_rate is not None:
        return made
    return replace(made, plan=made.plan.changed(learning_rate=begun))


def described(made: Run) -> str:
    """What will be run, in a sentence."""
    privacy = made.privacy
    noise = ", no privacy" if privacy is None else f", noise {privacy.noise:g}"
    if privacy is not None and privacy.noise_by_user is not None:
        noise += f" to {max(privacy.noise_by_user):g} (each user its own)"
    return (
        f"{made.label}: {made.plan.rounds} rounds of {made.cohort_size} of "
        f"{made.users} users, {made.plan.local_steps} steps each on "
        f"{int(made.batch_sizes.min())} to {int(made.batch_sizes.max())} records{noise}"
    )


# --- the run


def trained(asked: Asked) -> Result:
    """Take all rounds that are left, and write what the run leaves behind. Of several processes
    every one does the same; the first alone has the ledger and the folder."""
    run, comm = asked.run, asked.comm
    check_same(asked)
    line: AbstractContextManager[OnRound] = nullcontext(asked.on_round)
    if asked.progress:
        simulated = " (simulated)" if run.privacy is not None and not run.secret else ""
        line = live_line(f"{run.label}{simulated}", run.plan.rounds, asked.on_round)
    with begun(asked) as start, line as on_round:
        best = None
        if OPTIMUM in asked.named:
            best = comm.first(partial(solve, asked.federation, run.task, run.plan.regularisation))
        streams = run.randomness(comm.first(lambda: start.seed))
        training = Training(
            run=run,
            engine=_engine(asked, streams),
            account=start.account,
            randomness=streams,
            folder=start.folder,
            evaluate=_evaluation(asked, best),
            stopping=asked.stopping,
            on_round=on_round,
            every=run.plan.checkpoint_every,
            comm=comm,
            device=asked.device,
        )
        saved, history = comm.first(lambda: (start.saved, list(start.history)))
        if saved is not None:
            training.restore(saved, history)
        with _ends_stored(training), stop_signals() as stop:
            ending = training.advance(stop)
            return _result(asked, training, ending, best)


def _engine(asked: Asked, streams: Randomness) -> Engine | Loop:
    if asked.engine == "loop":
        return Loop(asked.run, asked.federation, asked.device, streams)
    runs, data = [asked.run], [asked.federation]
    return Engine(runs, data, asked.device, asked.chunk, [streams], comm=asked.comm)


def _evaluation(asked: Asked, best: Optimum | None) -> Evaluate:
    """Metrics of the output, of the last iterate too where the output is an average, your own, and
    the one that stops the run early."""
    evaluator = _evaluator(asked, None if best is None else best.loss)
    own = {metric.__name__: metric for metric in asked.metrics if not isinstance(metric, str)}

    def evaluate(state: State) -> MetricValues:
        found = dict(evaluator(state.output))
        if state.averaged:
            found |= {f"last_{key}": value for key, value in evaluator(state.params).items()}
        if own or asked.stopping is not None:
            model = Model.of(asked.federation, asked.run.task, state.output.cpu())
            found |= {name: float(of(model, asked.federation)) for name, of in own.items()}
        if asked.stopping is not None:
            found["validation"] = asked.stopping.value(model)
        return found

    return evaluate


def _evaluator(asked: Asked, optimum: float | None) -> Evaluator:
    """What measures a model: on several processes each evaluates its own users."""
    run, comm, data = asked.run, asked.comm, asked.federation
    given = (run.task, run.plan.regularisation, asked.device, optimum, asked.measures)
    if comm.count == 1:
        return Evaluator(data, *given)
    share = UserShare.of(data, user_ranges(run.users, comm.count)[comm.rank])
    return Evaluator(share.federation, *given, comm, share.all_users)


@contextmanager
def _ends_stored(training: Training) -> Iterator[None]:
    """A device or a process that gives up ends the run where it was stored; say how to go on."""
    try:
        yield
    except RankLost as error:
        where = f"in round {training.account.begun}; {_continues(training)}"
        raise RankLost(f"{error} {where}") from error
    except RuntimeError as error:
        if not device_failed(error):
            raise
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DeviceLost(
            f"device is {training.device}, and it gave up in round {training.account.begun} "
            f"({said}); {_continues(training)}"
        ) from error


def _continues(training: Training) -> str:
    if training.folder is None:
        return "nothing of the run is stored: with a folder (out) it could continue"
    where = f"checkpoint of round {training.stored}" if training.stored else "beginning"
    return f"once it is back, the run continues from its {where} with --resume"


# --- after the last round


def _result(asked: Asked, training: Training, ending: Ending, best: Optimum | None) -> Result:
    """The result, and with a folder what a finished (or halted) run leaves there."""
    state, folder = training.state, training.folder
    statement = asked.comm.first(partial(_stated, asked, training))
    common, own = state.output.cpu(), None
    if "personal" in asked.run.algorithm.remembers:
        own = own_models(training.engine.memory()["memories"], asked.run.users, common)
    result = Result(
        asked.run,
        asked.federation,
        training.history,
        common,
        state.round,
        ending.how,
        statement,
        best,
        folder.path if folder else None,
        training.seconds,
        ending.message,
        asked.origin,
        own=own,
    )
    if folder is not None:
        stored = ending.how != "interrupted"
        model = _save_model(folder, result.model) if stored else None
        folder.write_summary(summarise(result, model))
    return result


def _stated(asked: Asked, training: Training) -> Statement:
    """What the run guarantees; one that was stopped by its outputs counts all rounds."""
    if asked.stopping is not None:
        training.account.count_rest(training.randomness)
    return training.account.statement()


def _save_model(folder: RunFolder, model: Model) -> str:
    """Write the model; what cannot be stored (your own preparation) is said instead."""
    try:
        return str(model.save(folder.file(WITHIN)).relative_to(folder.path))
    except BadInput as problem:
        return f"not stored: {problem}"


def _with_joining(result: Result, strength: Strength) -> Result:
    """The result with the three numbers of every user; they are kept in the run folder."""
    joining = result.compare_sites("auto" if result.own is not None else strength)
    if result.folder is not None:
        text = json.dumps(plain(joining.to_dict()), indent=2) + "\n"
        RunFolder(result.folder).write_text(JOINING, text)
    return replace(result, joining=joining)
