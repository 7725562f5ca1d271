"""``dpscaffold provision``: a federation's keys, certificates and invitations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def provision_command(
    federation: Annotated[Path, typer.Argument(help="federation.toml: address and sites")],
    out: Annotated[Path, typer.Option(help="a new folder for keys and invitations")],
    with_keys: Annotated[
        bool,
        typer.Option("--with-keys", help="make the sites' keys too: for demos and tests only"),
    ] = False,
) -> None:
    """Make the keys and certificates of a federation, and one invitation per site."""
    from dpscaffold.flower import require

    require()
    from dpscaffold.provision import admit, provision, read_federation, read_invitation

    invitations = provision(read_federation(federation), out)
    typer.echo(f"{out / 'server'} holds the server's keys and certificates: keep it there, 0700")
    for path in invitations:
        typer.echo(f"{path} is for the site {path.stem}: nothing in it is secret")
    if not with_keys:
        typer.echo("each site runs dpscaffold site init with its invitation")
        return
    from dpscaffold.site.begin import make_site

    for path in invitations:
        member = make_site(read_invitation(path), out / path.stem)
        admit(out / "server", out / path.stem / f"{member.name}.site")
    typer.echo(
        "the sites' private keys were made here too (--with-keys), so whoever holds this folder "
        "can stand in for them: for demonstrations and tests only"
    )
