"""``dpscaffold audit``: does anybody beat the ε that a configuration or a run claims?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dpscaffold.checks import whole
from dpscaffold.errors import BadInput
from dpscaffold.report.fitting import legible

if TYPE_CHECKING:
    from dpscaffold.audit.play import Report
    from dpscaffold.audit.subject import AuditedRun

#: The exit status of an audit that refutes a claim.
BEATEN = 4


def audit_command(
    source: Annotated[Path, typer.Argument(help="Configuration file (TOML) or run folder.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key, for example privacy.noise=2. Can be repeated."),
    ] = None,
    trials: Annotated[
        int, typer.Option(help="Largest number of games on each of the two datasets.")
    ] = 20000,
    minutes: Annotated[float, typer.Option(help="Approximate duration in minutes.")] = 2.0,
    confidence: Annotated[
        float, typer.Option(help="Confidence level of all proved bounds together.")
    ] = 0.99,
    view: Annotated[
        str | None,
        typer.Option(
            help="Only this adversary: server, third-party, participant, or alone (secure sums)."
        ),
    ] = None,
    one_run: Annotated[
        int | None,
        typer.Option(
            "--one-run",
            help="Also train once on the real records with this many canaries. This spends "
            "privacy.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder of --one-run.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the games. Default: a random seed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Try to disprove the claimed ε by experiment; exit status 4 if it is disproved."""
    # Here and not above: asking for help should not load PyTorch.
    from dpscaffold.audit.onerun import OneRun, OneRunRequest, play_one_run
    from dpscaffold.audit.play import ONE_RUN, SHARES, AuditLimits, audit
    from dpscaffold.audit.subject import read_case
    from dpscaffold.training.progress import duration

    limits = AuditLimits(trials, minutes, confidence, seed)
    views = _views(view, tuple(SHARES))
    _check_options(one_run, out)
    case = read_case(source, set_ or [])
    _check_views(view, case, one_run)
    asked = None
    if one_run is not None and out is not None:
        asked = OneRunRequest.of(case, one_run, out, seed)
        asked.check()
    errors = Console(stderr=True, highlight=False)

    printed: dict[str, int] = {}

    def watch(name: str, games: int, wanted: int, left: float) -> None:
        if not as_json and (quarter_done(printed, name, games, wanted) or errors.is_terminal):
            errors.print(f"{name}: {games:,} of {wanted:,} games, {duration(left)} left")

    def single(seconds: float) -> OneRun:
        assert asked is not None
        return play_one_run(asked, 1 - ONE_RUN * (1 - confidence), max(1.0, seconds))

    report = audit(case, limits, views, watch, single if asked else None)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        _show(report, confidence)
    if report.beaten:
        raise typer.Exit(BEATEN)


def _check_options(one_run: int | None, out: Path | None) -> None:
    if one_run is not None:
        whole("--one-run", one_run, 10)
    if (one_run is None) != (out is None):
        raise BadInput(
            "missing-argument",
            _WITHOUT_A_FOLDER if out is None else f"--out is {out}, {_WITHOUT_A_RUN}",
        )


def _show(report: Report, confidence: float) -> None:
    from dpscaffold.report.audit import audit_rows, audit_sentences

    head = ("view", "proved ε", "claimed ε", "ratio", "games", "by")
    console = Console(highlight=False)
    console.print(legible(head, list(audit_rows(report)), console.width))
    for sentence in audit_sentences(report, confidence):
        console.print(sentence)


def quarter_done(printed: dict[str, int], name: str, games: int, wanted: int) -> bool:
    """Whether another quarter of the games is over: where lines stay, more would be too many.

    >>> printed: dict[str, int] = {}
    >>> sum(quarter_done(printed, "server", games, 1000) for games in range(0, 1001, 10))
    5
    """
    quarter = 4 * games // max(1, wanted)
    news = printed.get(name) != quarter
    printed[name] = quarter
    return news


_WITHOUT_A_FOLDER = (
    "--one-run trains on the real records, which spends some of their privacy, so its ledger must "
    "be kept; name a folder for it with --out"
)
_WITHOUT_A_RUN = "and nothing is trained without --one-run; leave it out, or give both"


def _views(view: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if view is None:
        return known
    name = view.replace("-", "_")
    if name not in known:
        raise BadInput(
            "unknown-view", f"--view is {view!r}; give server, third-party, participant or alone"
        )
    return (name,)


def _check_views(view: str | None, case: AuditedRun, one_run: int | None) -> None:
    """Refuse what does not go with secure sums, or needs them."""
    secure = case.subject.run.secure is not None
    if view in (("third-party", "third_party", "participant") if secure else ("alone",)):
        known = "server or alone" if secure else "server, third-party or participant"
        which = "with" if secure else "without"
        raise BadInput(
            "unknown-view", f"--view is {view!r} for a run {which} secure sums; give {known}"
        )
    if secure and one_run is not None:
        raise BadInput(
            "not-applicable",
            f"--one-run is {one_run}, and secure sums show no single upload to look for canaries "
            f"in; leave --one-run and --out out",
        )
