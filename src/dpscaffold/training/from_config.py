"""A configuration, run: what ``dpscaffold train`` does, from Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpscaffold.algorithms.failing import own_failures
from dpscaffold.checks import instance
from dpscaffold.config import Configuration, Run, load
from dpscaffold.config.release import check_release
from dpscaffold.data.loading import load_federation
from dpscaffold.engines.ranks import Ranks
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.models.personal import JOINING
from dpscaffold.privacy.seeds import public_seed
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.written import plain
from dpscaffold.training import Result
from dpscaffold.training import run as run_setting
from dpscaffold.training.distributed import leads, own_hardware
from dpscaffold.training.events import Listener, ListenerList, silence
from dpscaffold.training.front import continued, require_folder
from dpscaffold.training.progress import Progress
from dpscaffold.training.stopping import Stopping

#: Told what was read and what will be run, one sentence at a time.
Say = Callable[[str], None]

#: Models of single users take long enough to be announced from this many numbers on.
LONG = 1_000_000


def run(
    config: Path | str | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    out: Path | str | None = None,
    resume: bool = False,
    device: str = "cpu",
    engine: str = "simulator",
    progress: bool = False,
    listener: Listener = silence,
    data_key: Path | str | None = None,
) -> Result:
    """Train as a configuration says: ``dpscaffold train`` from Python.

    A run folder is written only if ``out`` names one. A release (``privacy.release``) and a run
    with a ``privacy.budget_file`` need one, because it keeps their ledger.

    Args:
        config: A TOML file, or its tables.
        overrides: Keys to change, as ``["plan.rounds=100"]`` or ``{"plan.rounds": 100}``.
        out: The run folder to write; None writes nothing.
        resume: Continue the run in ``out``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
        engine: ``"simulator"`` (fast), or ``"loop"`` (the slow reference implementation).
        progress: Show a live line.
        listener: Called with every event (:mod:`~dpscaffold.training.events`).
        data_key: A file with a key, as for :func:`~dpscaffold.train`.

    >>> result = run({"data": {"users": 5, "records": 40}}, {"plan.rounds": 2})
    >>> result.rounds, result.folder
    (2, None)
    """
    instance("config", config, (Path, str, Mapping), "a TOML file or its tables (a dict)")
    if isinstance(overrides, str):
        raise BadInput("not-a-list", f"overrides is {overrides!r}; give a list: [{overrides!r}]")
    given: list[str] = [
        *(_overriding(overrides) if isinstance(overrides, Mapping) else list(overrides))
    ]
    if isinstance(config, Mapping):
        settings = load(None, given, config)
    else:
        settings = load(config, given)
    folder = Path(out) if out is not None else None
    return run_settings(
        settings,
        folder,
        resume,
        device,
        engine,
        quiet=not progress,
        listener=listener,
        data_key=data_key,
    )


def run_seeds(
    settings: Configuration,
    folder: Path,
    count: int,
    resume: bool = False,
    **options: Any,
) -> list[Path]:
    """The same run with ``count`` seeds, in ``folder/seed-0``, ``seed-1`` and so on, which are
    returned. The data stay the same: they have a seed of their own.

    Runs that are complete are read back where ``resume`` is asked for. ``options`` are those of
    :func:`run_settings`.
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
    federation = load_federation(settings.data)
    places = [folder / f"seed-{seed}" for seed in range(first, first + count)]
    new = [not place.exists() for place in places]  # one that fails goes on where it was stored
    for k, place in enumerate(places):
        plan = settings.plan.changed(seed=first + k)
        one = settings.model_copy(update={"plan": plan})
        again = place.exists() and (resume or new[k])
        run_settings(one, place, again, federation=federation, **options)
    return places


def _overriding(values: Mapping[str, Any]) -> list[str]:
    import tomli_w

    plain = {key: str(v) if isinstance(v, Path) else v for key, v in values.items()}
    return [
        f"{key}={tomli_w.dumps({'v': value}).partition('=')[2].strip()}"
        for key, value in plain.items()
    ]


def _notifier(say: Say | None, warn: Say | None) -> Say | None:
    """What passes every note on to ``say``, or else warnings to ``warn``."""
    if say is not None or warn is None:
        return say
    return lambda note: warn(note) if note.startswith("warning:") else None


def _progress(setting: Run, quiet: bool) -> AbstractContextManager[Listener]:
    simulated = setting.privacy is not None and not setting.secret
    label = f"{setting.label}{' (simulated)' if simulated else ''}"
    return nullcontext(silence) if quiet else Progress(label, setting.plan.rounds)


def run_settings(
    settings: Configuration,
    folder: Path | None,
    resume: bool = False,
    device: str = "cpu",
    engine: str = "simulator",
    quiet: bool = False,
    federation: Federation | None = None,
    say: Say | None = None,
    warn: Say | None = None,
    listener: Listener = silence,
    data_key: Path | str | None = None,
    ranks: Ranks | None = None,
) -> Result:
    """Load the data, train with a progress line, return the result.

    ``say`` is called with what was read and what will be run, ``warn`` what should not be missed.
    ``ranks`` are the processes that share the run; None for one.
    """
    privacy, stopping = settings.privacy, stopping_of(settings)
    allowed = None if privacy is None else privacy.allowed
    if folder is None:
        require_folder(allowed is not None, None if privacy is None else privacy.budget_file)
    if federation is None:
        federation = load_federation(settings.data, _notifier(say, warn))
    setting = settings.setting(federation)
    check_release(setting, federation)
    setting = continued(setting, folder, resume)
    resolved, home = settings.resolved(setting), settings.home
    if say is not None:
        say(str(federation))
        say(described(setting))
    name = settings.algorithm.name
    with (
        _progress(setting, quiet) as progress,
        own_failures(name) if ":" in name else nullcontext(),
    ):
        result = run_setting(
            setting,
            federation,
            own_hardware(device, ranks),
            engine=engine,
            out=folder,
            resume=resume,
            listener=ListenerList((progress, listener)),
            config=resolved,
            metrics=settings.task.metrics or (),
            stopping=stopping,
            allowed=allowed,
            home=home,
            data_key=data_key,
            ranks=ranks,
        )
    return _with_joining(result, settings, say or warn) if leads(ranks) else result


def _with_joining(result: Result, settings: Configuration, say: Say | None) -> Result:
    """The result with the three numbers of every user, where ``[personal]`` asks for them; they are
    kept in the run folder."""
    if settings.personal is None or result.ended == "interrupted":
        return result
    federation = result.federation
    if say is not None and federation.train.features.numel() > LONG:
        say(f"fitting a local and a personal model for each of {federation.users} users")
    joining = result.compare_sites("auto" if result.own is not None else settings.personal.strength)
    if result.folder is not None:
        RunFolder(result.folder).write_text(
            JOINING, json.dumps(plain(joining.to_dict()), indent=2) + "\n"
        )
    return replace(result, joining=joining)


def stopping_of(settings: Configuration) -> Stopping | None:
    """What ends the run early, where the configuration asks for it."""
    given = settings.stopping
    if given is None:
        return None
    own = getattr(settings.data, "label", "label")
    label = own if isinstance(own, str) else None
    return Stopping(
        Path(given.path).expanduser(),
        label=label,
    )


def described(setting: Run) -> str:
    """What will be run, in a sentence."""
    privacy = setting.privacy
    noise = ", no privacy" if privacy is None else f", noise {privacy.noise:g}"
    if privacy is not None and privacy.noise_by_user is not None:
        noise += f" to {max(privacy.noise_by_user):g} (each user its own)"
    return (
        f"{setting.label}: {setting.plan.rounds} rounds of {setting.cohort_size} of "
        f"{setting.users} users, {setting.plan.local_steps} steps each on "
        f"{int(setting.batch_sizes.min())} to {int(setting.batch_sizes.max())} records{noise}"
    )
