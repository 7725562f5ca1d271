"""``dpscaffold provision``: a federation's keys, certificates and invitations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperGroup


class NewByDefault(TyperGroup):
    """A group that takes ``provision federation.toml`` for ``provision new federation.toml``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the command where none is named."""
        if args and args[0] not in self.commands and "--help" not in args and "-h" not in args:
            args = ["new", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="provision",
    cls=NewByDefault,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def provision() -> None:
    """Make or renew the keys and certificates of a deployed federation."""


@app.command("new")
def provision_command(
    federation: Annotated[
        Path, typer.Argument(help="The file federation.toml, with address and sites.")
    ],
    out: Annotated[Path, typer.Option(help="New folder for keys and invitations.")],
    with_keys: Annotated[
        bool,
        typer.Option("--with-keys", help="Make the sites' keys too. For demos and tests only."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Make the keys and certificates of a federation, and one invitation per site."""
    from dpscaffold.deployment.transports.flower import require

    require()
    from dpscaffold.deployment.provision import admit, read_federation, read_invitation
    from dpscaffold.deployment.provision import provision as make_federation

    invitations = make_federation(read_federation(federation), out)
    if with_keys:
        from dpscaffold.deployment.site.begin import make_site

        for path in invitations:
            member = make_site(read_invitation(path), out / path.stem)
            admit(out / "server", out / path.stem / f"{member.name}.site")
    if as_json:
        made = {path.stem: str(path) for path in invitations}
        answer = {
            "server": str(out / "server"),
            "invitations": made,
            "fingerprints": {path.stem: read_invitation(path).fingerprint for path in invitations},
            "with_keys": with_keys,
        }
        typer.echo(json.dumps(answer, indent=2))
        return
    typer.echo(f"{out / 'server'} holds the server's keys and certificates: keep it there, 0700")
    for path in invitations:
        shown = read_invitation(path).fingerprint
        typer.echo(f"{path} is for the site {path.stem}, fingerprint {shown}: nothing in it is")
        typer.echo("  secret, but compare the fingerprint with 'site init' there, by telephone")
    typer.echo(
        "the sites' private keys were made here too (--with-keys), so whoever holds this folder "
        "can stand in for them: for demonstrations and tests only"
        if with_keys
        else "each site runs dpscaffold site init with its invitation"
    )


@app.command()
def renew(
    server: Annotated[
        Path, typer.Option(help="The server's folder, written by 'dpscaffold provision'.")
    ] = Path("federation/server"),
    out: Annotated[Path, typer.Option(help="Notice for the sites to write.")] = Path(
        "federation.renewal"
    ),
    coordinator: Annotated[
        bool, typer.Option("--coordinator", help="Make a new coordinator's key too.")
    ] = False,
) -> None:
    """Renew the certificates, and write a signed notice for the sites. Stop the server first."""
    from dpscaffold.deployment.transports.flower import require

    require()
    from dpscaffold.deployment.provision import renew as renew_folder

    notice = renew_folder(server, out, coordinator)
    typer.echo(f"{server} has new certificates{' and a new key' if coordinator else ''}")
    typer.echo(f"{out} is for every site (site renew), fingerprint {notice.fingerprint}")
