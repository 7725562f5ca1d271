"""``dpscaffold site``: what the operator of a site needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpscaffold.cli import site_runs
from dpscaffold.cli.site_runs import AsJson, File, Yes, confirm

app = typer.Typer(
    name="site", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)


@app.callback()
def site() -> None:
    """Take part in a deployed federation as a site."""


@app.command()
def init(
    invitation: Annotated[
        Path, typer.Argument(help="The NAME.invitation file from the federation.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="New folder to write. Default: the site's name.")
    ] = None,
) -> None:
    """Make this site's keys and its site.toml, and print what to send back."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.provision import read_invitation
    from dpscaffold.deployment.site.begin import make_site

    invited = read_invitation(invitation)
    folder = out or Path(invited.name)
    member = make_site(invited, folder)
    typer.echo(f"the invitation has the fingerprint {invited.fingerprint}: compare it with the")
    typer.echo("  one that 'provision' showed at the server, by telephone, before you go on")
    typer.echo(f"{folder / 'site.toml'}: read the policy, set it, and say where the data are")
    typer.echo(f"send {folder / (member.name + '.site')} back (it is public):")
    typer.echo(member.to_toml())
    typer.echo(f"this site's fingerprint is {member.fingerprint}; 'server admit' shows it too")


@app.command()
def renew(
    notice: Annotated[Path, typer.Argument(help="The notice from 'provision renew'.")],
    file: File = Path("site.toml"),
    yes: Yes = False,
) -> None:
    """Take over a federation's new certificate and coordinator's key."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.provision import accept_renewal, read_renewal
    from dpscaffold.deployment.site.file import read_site_file

    found, site = read_renewal(notice), read_site_file(file)
    typer.echo(f"the notice has the fingerprint {found.fingerprint}")
    if not yes:
        confirm("is it the one that 'provision renew' showed at the server?")
    if accept_renewal(found, file, site.coordinator, site.ca):
        typer.echo(f"{site.ca} and {file} are renewed; start the site again")
    else:
        typer.echo("this site has them already")


@app.command()
def check(
    file: File = Path("site.toml"),
    offer: Annotated[Path | None, typer.Option(help="Plan to check. No ledger is changed.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not connect to the server.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check file, keys, data, connection and clock, and whether a plan would be accepted."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.transports.flower.operation import check_site

    found = []
    for sentence, good in check_site(file, offer, not offline):
        found.append({"ok": good, "found": sentence})
        if not as_json:
            typer.echo(f"{'ok  ' if good else 'FAIL'} {sentence}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    if not all(entry["ok"] for entry in found):
        raise typer.Exit(1)


@app.command()
def start(
    file: File = Path("site.toml"),
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use no TLS. For tests, on loopback only.")
    ] = False,
) -> None:
    """Connect to the server and answer its messages until SIGTERM."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.transports.flower.operation import start_site

    start_site(file, insecure, typer.echo)


@app.command()
def ledger(
    file: File = Path("site.toml"),
    as_json: AsJson = False,
) -> None:
    """Show the ε granted and spent, per run and in total."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.site.operation import ledger_lines, ledger_of

    said = ledger_of(file)
    typer.echo(json.dumps(said, indent=2) if as_json else "\n".join(ledger_lines(said)))


@app.command()
def recover(
    file: File = Path("site.toml"),
    yes: Yes = False,
) -> None:
    """After ledger-behind: record unaccounted budget as spent, then continue."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.site.operation import recover_site

    if not yes:
        confirm("the rest of the grant will be recorded as spent, permanently; continue?")
    said = recover_site(file)
    typer.echo("\n".join(said) or "the ledger is not behind; nothing was recorded")


@app.command()
def status(
    file: File = Path("site.toml"),
    as_json: AsJson = False,
) -> None:
    """Show whether the site's process runs, what it did last, and the ε that is left."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.observe.status import read_site_status, site_lines
    from dpscaffold.deployment.site.operation import status_of

    if as_json:
        typer.echo(json.dumps(status_of(file), indent=2))
        return
    typer.echo("\n".join(site_lines(read_site_status(file))))


for _command in (
    site_runs.requests,
    site_runs.approve,
    site_runs.refuse,
    site_runs.audit,
):
    app.command()(_command)
