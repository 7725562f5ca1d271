"""A deployed run over Flower, from its configuration to its report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dpscaffold.deployment.protocol.enrolment import SignedExchange
from dpscaffold.deployment.protocol.exchange import ExchangeStopped
from dpscaffold.deployment.provision import (
    Member,
    expiry_warnings,
    host_and_port,
    is_loopback,
    read_secret,
    read_signing_key,
    roster,
    write_whole,
)
from dpscaffold.deployment.server.config import load_served
from dpscaffold.deployment.server.run import Deployment, DeploymentResult
from dpscaffold.deployment.transports.flower import check_proxy
from dpscaffold.deployment.transports.flower.revoking import LiveRoster
from dpscaffold.deployment.transports.flower.run import FlowerExchange, SuperLinkAddress
from dpscaffold.engine.device import reuse_memory, stop_signals
from dpscaffold.errors import BadInput
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.journal import Anchor

TOTALS = "totals.json"
HEADS = "heads.json"


def run_deployed(
    config: Path,
    out: Path,
    server: Path,
    resume: bool,
    without: list[str],
    overrides: list[str],
    insecure: bool,
    as_json: bool,
    echo: Callable[[str, bool], None],
    carrier: Callable[[tuple[Member, ...], float], FlowerExchange] | None = None,
    continues: Path | None = None,
) -> str:
    """One deployed run; returns how it ended. ``echo`` gets sentences, and whether they are
    asides (for standard error). ``carrier`` makes the exchange of the members and the deadline; by
    default it opens Flower runs of its own. ``continues`` is the folder of a run whose rounds that
    are left are taken."""
    os.umask(0o077)  # a run folder holds what the server knows of each site
    reuse_memory()
    settings = load_served(config, overrides)
    if carrier is None:
        check_proxy(settings.deploy.address)
    if insecure and not is_loopback(host_and_port("deploy.address", settings.deploy.address)[0]):
        raise BadInput("not-loopback", "--insecure is for loopback alone; leave it out")
    members = _members(server, without)
    if not resume:  # sizes were agreed on when the run began
        _check_named(settings.deploy.records, members)
    office = SuperLinkAddress(
        settings.deploy.address,
        None if insecure else (server / "ca.crt").read_bytes(),
        read_secret(server / "superexec.secret"),
    )

    def say(sentence: str) -> None:
        echo(sentence, as_json)

    for warning in server_warnings(server, insecure):
        say(warning)

    wait = settings.deploy.deadline
    exchange = carrier(members, wait) if carrier else FlowerExchange(office, members, wait, say=say)
    post = SignedExchange(
        exchange,
        read_signing_key(server / "coordinator.key"),
        {member.name: member.signing_key for member in members},
        totals=read_totals(server / TOTALS),
        heads=read_heads(server / HEADS),
        admitted=LiveRoster(server).members,
    )

    def keep_seen() -> None:
        keep_totals(server / TOTALS, post.totals)
        keep_heads(server / HEADS, post.heads)

    def after(round: int, row: HistoryRow) -> None:
        keep_seen()
        seconds = row.metrics["round_seconds"] or 0.0
        say(f"round {round}: {row.metrics['arrived']} answered in {seconds:.2f} s")

    deployment = Deployment(
        settings.offer(),
        post,
        RunFolder(out),
        settings.resolved(),
        settings.privacy,
        settings.patience,
        scorer=settings.scorer(config.resolve().parent),
        scorer_of=lambda rows: settings.scorer(config.resolve().parent, rows),
        say=say,
        observer=after,
        bytes_crossed=lambda: (exchange.traffic.bytes_out, exchange.traffic.bytes_in),
        reachable=lambda: exchange.reachable,
        records=settings.deploy.records,
    )
    exchange.stop, exchange.enough = lambda: bool(deployment.stop), settings.patience.quorum
    completed = False
    with stop_signals() as deployment.stop:
        try:
            names = tuple(member.name for member in members)
            served = deployment.run(names, resume, continues)
            completed = served.ended == "completed"
        except ExchangeStopped as where:
            echo(f"stopped by {deployment.stop[0]} before the first round ({where})", as_json)
            return "interrupted"
        finally:
            keep_seen()
            exchange.close(completed)
    _report(served, out, as_json, echo)
    return served.ended


def server_warnings(server: Path, insecure: bool) -> list[str]:
    """What the server's operator should know about certificates that end soon."""
    paths = [] if insecure else [server / "ca.crt", server / "server.crt"]
    return expiry_warnings(paths, "run dpscaffold provision renew, and send sites the notice")


def _members(server: Path, without: Sequence[str]) -> tuple[Member, ...]:
    """The sites on the roster, those left out apart."""
    everybody = {member.name: member for member in roster(server)}
    for name in without:
        if name not in everybody:
            raise BadInput("unknown-site", f"--without is {name!r}, which is not on the roster")
    members = tuple(member for name, member in everybody.items() if name not in without)
    if not members:
        raise BadInput(
            "no-sites", "no site is left on the roster; dpscaffold server admit adds them"
        )
    return members


def _check_named(records: Mapping[str, int] | None, members: tuple[Member, ...]) -> None:
    names = {member.name for member in members}
    if records is not None and set(records) != names:
        raise BadInput(
            "sites-differ",
            f"deploy.records names {', '.join(sorted(records))}, and those who take part are "
            f"{', '.join(sorted(names))}; give everybody's size, and nobody else's",
        )


def _report(
    served: DeploymentResult, out: Path, as_json: bool, echo: Callable[[str, bool], None]
) -> None:
    if as_json:
        echo(json.dumps(RunFolder(out).summary().to_json(), indent=2), False)
        return
    echo(f"{served.ended} after round {served.state.round}; {out} holds the run", False)
    if served.message:
        echo(served.message, False)


def read_totals(path: Path) -> dict[str, int]:
    """The largest counts that sites have reported to this server, over all runs."""
    if not path.exists():
        return {}
    try:
        return {str(name): int(count) for name, count in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput("totals-damaged", f"{path} is damaged ({error}); restore it") from error


def keep_totals(path: Path, seen: Mapping[str, int]) -> None:
    """Note counts that are larger than those received before. They only ever grow, over all
    runs: a site that restores an old state is found out."""
    known = read_totals(path)
    merged = {name: max(known.get(name, 0), seen.get(name, 0)) for name in {*known, *seen}}
    if merged != known:
        write_whole(path, json.dumps(merged).encode())


def read_heads(path: Path) -> dict[str, tuple[Anchor, ...]]:
    """The last heads of their ledgers that sites have shown to this server."""
    if not path.exists():
        return {}
    try:
        saved = json.loads(path.read_bytes()).items()
        return {str(n): Anchor.read_all(heads, str(path)) for n, heads in saved}
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput("totals-damaged", f"{path} is damaged ({error}); restore it") from error


def keep_heads(path: Path, seen: Mapping[str, tuple[Anchor, ...]]) -> None:
    """Note the last heads of these sites. They count over all runs: of two copies of a site only
    one can take part in the next run."""
    known = read_heads(path)
    if {**known, **seen} != known:
        saved = {n: [dict(vars(h)) for h in heads] for n, heads in {**known, **seen}.items()}
        write_whole(path, json.dumps(saved).encode())
