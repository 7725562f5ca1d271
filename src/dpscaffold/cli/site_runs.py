"""Commands of ``dpscaffold site`` about runs: requests, a person's decision, the audit log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from dpscaffold.deployment.site.approval import RunRequest
    from dpscaffold.deployment.site.file import SiteFile

File = Annotated[Path, typer.Argument(help="The file site.toml.")]
Run = Annotated[str, typer.Argument(help="Identifier of the run, or its beginning.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def requests(
    file: File = Path("site.toml"),
    waiting: Annotated[
        bool, typer.Option("--waiting", help="Only requests without a decision.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which runs the server asked for, what each costs, and what was decided."""
    from dpscaffold.deployment.site.approval import listed, requests_in

    site = _site(file)
    found = [
        one for one in listed(requests_in(site.state)) if not waiting or one.decision == "waiting"
    ]
    if as_json:
        typer.echo(json.dumps([json.loads(one.to_json()) for one in found], indent=2))
        return
    for one in found:
        _show(site, one)
    if not found:
        typer.echo("no request waits for a decision" if waiting else "no server has asked yet")


def approve(run: Run, file: File = Path("site.toml"), yes: Yes = False) -> None:
    """Say yes to a run. The server continues with 'server run --resume'."""
    _decide(file, run, "approved", yes)


def refuse(run: Run, file: File = Path("site.toml"), yes: Yes = False) -> None:
    """Say no to a run, also to one that has begun. Nothing more leaves for it."""
    _decide(file, run, "refused", yes)


def _decide(file: Path, run: str, decision: str, yes: bool) -> None:
    from dpscaffold.deployment.site.approval import chosen, decide, requests_in

    site = _site(file)
    request = chosen(requests_in(site.state), run)
    _show(site, request)
    if not yes:
        confirm(f"record this run as {decision}?")
    decide(site.state, request, "approved" if decision == "approved" else "refused")
    typer.echo(f"run {request.run[:8]}… is {decision}")


def audit(
    file: File = Path("site.toml"),
    since: Annotated[
        str | None,
        typer.Option(help="LINES:HASH of an earlier check. The log must still begin with it."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all lines of the log, one JSON object each.")
    ] = False,
) -> None:
    """Verify the audit log of requests, decisions and uploads."""
    from dpscaffold.deployment.site.audit import AuditLog, verified
    from dpscaffold.deployment.site.operation import ledger_of

    site = _site(file)
    found = verified(site.state, ledger_of(file)["participations"], since)
    if as_json:
        for line in AuditLog(site.state).lines():
            typer.echo(json.dumps(line))
        return
    typer.echo(found.sentence)


def _site(file: Path) -> SiteFile:
    """The site's file; refused where its state folder does not exist yet."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.site.file import read_site_file

    site = read_site_file(file)
    if not site.state.is_dir():
        raise BadInput(
            "not-started",
            f"there is no state folder {site.state}: the site has never started; run dpscaffold "
            f"site start",
        )
    return site


def _show(site: SiteFile, request: RunRequest) -> None:
    from dpscaffold.deployment.site.approval import request_lines, requests_in

    typer.echo("\n".join(request_lines(request, site.server)))
    typer.echo(f"  plan      {requests_in(site.state).offer_path(request.run)}")


def confirm(question: str) -> None:
    """Continue only after a yes."""
    try:
        agreed = typer.confirm(question)
    except typer.Abort:  # no terminal, or its end
        raise BadInput(
            "not-confirmed", "nobody answered, so nothing was recorded; give --yes to continue"
        ) from None
    if not agreed:
        raise BadInput("not-confirmed", "the answer was no, so nothing was recorded")
