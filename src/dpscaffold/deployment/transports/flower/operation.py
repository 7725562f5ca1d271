"""What the commands of a site do over Flower: start, and check."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import torch

from dpscaffold.atomic import write_text
from dpscaffold.deployment.observe.logs import rotating_log
from dpscaffold.deployment.protocol.messages import Refused, SignedMessage, public_of
from dpscaffold.deployment.protocol.sums import Members
from dpscaffold.deployment.provision import (
    check_certificate,
    expiry_warnings,
    host_and_port,
    is_loopback,
    open_to_others,
    read_node_key,
    read_signing_key,
)
from dpscaffold.deployment.server.config import load_served
from dpscaffold.deployment.site.answer import Site
from dpscaffold.deployment.site.file import (
    Policy,
    SiteFile,
    SiteGrant,
    Terms,
    check_terms,
    grant,
    read_site_file,
)
from dpscaffold.deployment.site.ledger import SiteLedger
from dpscaffold.deployment.site.memory import RunMemory, StateFolder
from dpscaffold.deployment.site.reading import broken_lines, check_data_table
from dpscaffold.deployment.site.secure import described_members, named_members, summed
from dpscaffold.deployment.site.work import opener
from dpscaffold.deployment.transports.flower import check_proxy
from dpscaffold.deployment.transports.flower.node import (
    Address,
    Fleet,
    certificate_trouble,
    clock_of,
    serve,
)
from dpscaffold.engine.device import pick_device, reuse_memory, trim_memory
from dpscaffold.errors import BadInput
from dpscaffold.privacy.numbers import round_up

#: What a site's operator does about a certificate that ends.
RENEW = "ask the federation's operator for a notice, and run dpscaffold site renew"


def start_site(path: Path, insecure: bool, echo: Callable[[str], None]) -> None:
    """Answer messages until SIGTERM or SIGINT; the participation in progress is finished and
    stored."""
    file = read_site_file(path)
    check_proxy(file.server)
    if insecure and not is_loopback(host_and_port("server", file.server)[0]):
        raise BadInput("not-loopback", "--insecure is for loopback alone; leave it out")
    if not insecure:
        check_certificate(file.ca)
    key, node_key = read_signing_key(file.signing_key), read_node_key(file.node_key)
    check_data_table(file.data, path.resolve().parent)
    os.umask(0o077)
    reuse_memory()
    state = StateFolder(file.state, file.name)
    say = logger_of(file, echo)
    for warning in () if insecure else expiry_warnings([file.ca], RENEW):
        say(warning)
    SiteLedger(state.ledger, file.name)  # a damaged ledger is said now, not at the first message
    device = pick_device("auto")
    site = Site(
        file.name,
        file.coordinator,
        key,
        state,
        _live_policy(path, file.policy, say),
        opener(file, path.resolve().parent, device, say),
        log=say,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    address = Address(file.server, None if insecure else file.ca.read_bytes())
    fleet = Fleet(address, node_key, file.state / "node_id")
    echo(f"the site {file.name} starts; its policy is in {path}")
    try:
        serve(fleet, _watched(site, state), stop, say, trim_memory)
    finally:
        state.close()


def _live_policy(path: Path, first: Policy, say: Callable[[str], None]) -> Callable[[], Policy]:
    """The policy as the file says it now; a file that cannot be read stops the site's answers."""
    seen: dict[str, Any] = {"stamp": None, "policy": first}

    def policy() -> Policy:
        stamp = path.stat().st_mtime_ns
        if stamp != seen["stamp"]:
            seen["policy"], seen["stamp"] = read_site_file(path).policy, stamp
        current: Policy = seen["policy"]
        return current

    return policy


def _watched(site: Site, state: StateFolder) -> Callable[[SignedMessage], SignedMessage]:
    """Answers, with ``status.json`` kept next to."""
    counts = {"answered": 0}

    def answer(signed: SignedMessage) -> SignedMessage:
        began = time.perf_counter()
        answer = site.answer(signed)
        counts["answered"] += 1
        said = {
            "site": site.name,
            "process": os.getpid(),
            "last_message": datetime.now(UTC).isoformat(timespec="seconds"),
            "last_kind": str(answer.header.get("kind", "")),
            "last_seconds": round(time.perf_counter() - began, 3),
            "answered": counts["answered"],
            "refusals": site.refusals,
        }
        with suppress(OSError):  # a full disk must not end the process
            write_text(state.path / "status.json", json.dumps(said) + "\n")
        return answer

    return answer


def logger_of(file: SiteFile, echo: Callable[[str], None]) -> Callable[[str], None]:
    """Sentences with time and level, to the site's own log and to the terminal."""

    write = rotating_log(file.state / "site.log")

    def say(sentence: str) -> None:
        write(sentence)
        echo(sentence.splitlines()[-1] if sentence else "")

    return say


def check_site(path: Path, offer: Path | None, connect: bool) -> Iterator[tuple[str, bool]]:
    """One sentence for each thing that is looked at, and whether it is fine."""
    file = read_site_file(path)
    yield f"{path} says who this site is ({file.name}) and what it accepts", True
    for what, look in (
        ("the node key", lambda: read_node_key(file.node_key)),
        ("the signing key", lambda: read_signing_key(file.signing_key)),
        ("the federation's certificate", lambda: check_certificate(file.ca)),
        ("the data file", lambda: check_data_table(file.data, path.resolve().parent)),
    ):
        try:
            look()
            yield f"{what} is there and readable by its owner", True
        except BadInput as error:
            yield str(error), False
    yield from _modes_checked(path, file)
    for warning in expiry_warnings([file.ca], RENEW):
        yield warning, False
    yield from _members_checked(file)
    if offer is None:
        yield from _lines_checked(path, file)
    if connect:
        yield _connection(file)
    if offer is not None:
        yield from _judged(path, file, offer)


def _modes_checked(path: Path, file: SiteFile) -> Iterator[tuple[str, bool]]:
    """Files that other users of this machine can read or change, and should not."""
    data = path.resolve().parent / str(file.data.get("path", ""))
    for what, where, bits, remedy in (
        ("the policy can be changed", path, 0o022, "go-w"),
        ("the data can be read", data, 0o006, "o-rw"),
        ("the data can be changed", data, 0o022, "go-w"),
        ("the state folder can be entered", file.state, 0o077, "go-rwx"),
    ):
        if where.exists() and open_to_others(where, bits):
            yield f"{what} by other users of this machine: chmod {remedy} {where}", False


def _members_checked(file: SiteFile) -> Iterator[tuple[str, bool]]:
    """This site's fingerprint, and who the other members of secure sums are."""
    try:
        public = public_of(read_signing_key(file.signing_key))
    except BadInput:
        return  # said already
    folders = sorted((file.state / "runs").glob("*")) if file.state.is_dir() else []
    try:
        runs = [RunMemory(folder).enrolment() for folder in folders]
    except Refused as no:
        yield f"the state folder cannot be read: {no.detail}", False
        return
    offered = [Members.from_dict(run.members) for run in runs if run and run.members]
    yield from described_members(file, public, offered)


def _connection(file: SiteFile) -> tuple[str, bool]:
    try:
        ahead = clock_of(Address(file.server, file.ca.read_bytes()))
    except (httpx.HTTPError, OSError, KeyError) as error:
        wrong = certificate_trouble(error)
        if wrong is not None:
            return wrong, False
        return f"{file.server} cannot be reached ({type(error).__name__}: {error})", False
    fine = -300 < ahead < 4
    return f"{file.server} answers; this clock is {ahead:+.0f} s from its own", fine


def _lines_checked(path: Path, file: SiteFile) -> Iterator[tuple[str, bool]]:
    """The lines that cannot be read, whatever a plan asks for: they stay records, and say nothing.
    A server never learns of them, so this is where they are found."""
    try:
        yield from broken_lines(file.data, path.resolve().parent)
    except BadInput:
        return  # said already


def _judged(path: Path, file: SiteFile, offer: Path) -> Iterator[tuple[str, bool]]:
    """What this site would answer to a plan, and which records would say nothing; the ledger is
    read and not written."""
    served = load_served(offer)
    open_work = opener(file, path.resolve().parent, torch.device("cpu"), lambda sentence: None)
    left = SiteLedger(file.state / "ledger.jsonl", file.name).left(file.policy)
    for part in served.offer().parts:
        what = f"{offer}" if part.fit is None else f"{offer}, which fits {part.fit.step} first,"
        try:
            work = open_work(part.to_dict(), file.policy)
            if part.fit is None:
                yield from work.held.notes
                yield from ((said, True) for said in work.held.described(work.offer.rows))
            terms = summed(work, file.name, named_members(work, served.deploy.records), file.policy)
            check_terms(file.policy, terms)
            granted = grant(file.policy, terms, work.records, work.batch, left, work.declared)
        except Refused as no:
            yield f"{what} would be refused: {no}", False
            return
        yield _accepted(what, terms, granted), True
        left = left.without(granted)


def _accepted(what: str, terms: Terms, granted: SiteGrant) -> str:
    cost = "no privacy" if granted.epsilon is None else f"epsilon {round_up(granted.epsilon)}"
    towards = "towards the server"
    if terms.sums is not None:
        towards += f" together with {terms.sums.colluders} of the other sites"
    if granted.epsilon_alone is not None:
        towards += f"; epsilon {round_up(granted.epsilon_alone)} if all other sites collude"
    return (
        f"{what} would be accepted: at most {granted.participations} participations, {cost} at "
        f"delta {granted.delta:.3g}, {towards}"
    )
