"""``dpscaffold server``: the SuperLink behind its gate, deployed runs, and the roster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpscaffold.cli.usage import refuse_given

app = typer.Typer(
    name="server", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)
Folder = Annotated[
    Path, typer.Option("--server", help="The server's folder, written by 'dpscaffold provision'.")
]


@app.callback()
def server() -> None:
    """Run the server of a deployed federation."""


@app.command()
def start(
    folder: Folder = Path("federation/server"),
    public: Annotated[str, typer.Option(help="Address that sites connect to.")] = "0.0.0.0:8443",
    inner: Annotated[
        str, typer.Option(help="Address that 'server run' connects to.")
    ] = "127.0.0.1:8444",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use no TLS. For tests, on loopback only.")
    ] = False,
) -> None:
    """Start Flower's SuperLink, behind a gate that exposes only what sites need."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.provision import host_and_port
    from dpscaffold.deployment.transports.flower.link import Listeners, serve_link
    from dpscaffold.errors import BadInput

    listeners = Listeners(
        host_and_port("--public", public), host_and_port("--inner", inner), folder, insecure
    )
    for address in (listeners.public, listeners.inner):
        if not _free(address):
            raise BadInput(
                "address-taken", f"the address {address[0]}:{address[1]} is taken; choose another"
            )
    serve_link(listeners, lambda: _ready(listeners, folder, insecure))


def _free(address: tuple[str, int]) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def _ready(listeners: Any, folder: Path, insecure: bool) -> None:
    """Say where it listens, and let the roster's sites connect before any run begins."""
    import threading

    from dpscaffold.deployment.provision import read_secret, roster
    from dpscaffold.deployment.transports.flower.run import TROUBLE, SuperLinkAddress, register
    from dpscaffold.deployment.transports.flower.serving import server_warnings

    office = SuperLinkAddress(
        f"{listeners.inner[0]}:{listeners.inner[1]}",
        None if insecure else (folder / "ca.crt").read_bytes(),
        read_secret(folder / "superexec.secret"),
    )

    def admit_all() -> None:
        try:
            register(office, roster(folder))
        except TROUBLE as error:
            typer.echo(f"the roster was not registered ({type(error).__name__})", err=True)

    threading.Thread(target=admit_all, daemon=True).start()
    for warning in server_warnings(folder, insecure):
        typer.echo(warning, err=True)
    public = f"{listeners.public[0]}:{listeners.public[1]}"
    typer.echo(f"sites connect to {public}; server run connects to {office.address}")


@app.command()
def run(
    config: Annotated[
        Path, typer.Argument(help="Plan to offer (TOML): [schema], [task], … [deploy].")
    ],
    out: Annotated[Path, typer.Option(help="Run folder to write.")],
    folder: Folder = Path("federation/server"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    continues: Annotated[
        Path | None,
        typer.Option(
            "--continue",
            help="Folder of a run that was stopped: train its remaining rounds with the sites "
            "that are on the roster now. At least one of them must be new.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Train without this site. Can be repeated.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a key, for example plan.rounds=100. Can be repeated.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use no TLS. For tests, on loopback only.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Offer a plan to the sites, train with them and write a run folder."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.transports.flower.serving import run_deployed

    def echo(sentence: str, aside: bool) -> None:
        typer.echo(sentence, err=aside)

    if resume:
        refuse_given({"--continue": continues}, "and --resume too; --out knows what it continues")
    left, changed = without or [], set_ or []
    ended = run_deployed(
        *(config, out, folder, resume, left, changed, insecure, as_json, echo),
        continues=continues,
    )
    if ended == "stalled":
        raise typer.Exit(4)
    if ended == "interrupted":
        raise typer.Exit(143)


@app.command()
def admit(
    files: Annotated[list[Path], typer.Argument(help="The NAME.site files that sites sent back.")],
    folder: Folder = Path("federation/server"),
) -> None:
    """Admit sites to the roster."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.provision import admit as admit_one

    for path in files:
        member = admit_one(folder, path)
        typer.echo(f"{member.name} is admitted, fingerprint {member.fingerprint}: compare it with")
        typer.echo("  the one that 'site init' showed there, by telephone")


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="Name of the site.")],
    folder: Folder = Path("federation/server"),
) -> None:
    """Remove a site from the roster. Its connection and its part in a run end at once."""
    from dpscaffold.deployment.transports import flower

    flower.require()
    from dpscaffold.deployment.provision import remove as remove_one

    remove_one(folder, name)
    typer.echo(f"{name} is removed: it is shut out now, and a run in progress goes on without it")


@app.command()
def status(
    run_folder: Annotated[Path, typer.Argument(help="Run folder.")],
    page: Annotated[
        str | None,
        typer.Option(
            help="Loopback address, e.g. 127.0.0.1:8080: serve a status page, /healthz and "
            "/status.json there until Ctrl-C."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show the progress of a run and which of its sites answer or can be reached."""
    from dpscaffold.deployment.observe.status import read_server_status, server_lines

    found = read_server_status(run_folder)
    if page is not None:
        refuse_given({"--json": as_json}, "for the terminal, and --page is given; leave one out")
        _serve_status(run_folder, page)
    elif as_json:
        typer.echo(json.dumps(json.loads((run_folder / "status.json").read_text()), indent=2))
    else:
        typer.echo("\n".join(server_lines(found)))


def _serve_status(folder: Path, address: str) -> None:
    """Serve the status of a run until the process is stopped."""
    from dpscaffold.deployment.observe.endpoint import serve_pages
    from dpscaffold.deployment.observe.page import server_pages

    server = serve_pages("--page", address, server_pages(folder))
    typer.echo(f"http://{address}/ shows the run in {folder}; stop it with Ctrl-C")
    server.serve_forever()
