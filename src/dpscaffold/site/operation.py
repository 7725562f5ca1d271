"""What the commands of a site do: start, check, ledger, recover, status, evaluate."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dpscaffold.engines.letters import Letter, Refused
from dpscaffold.errors import BadInput
from dpscaffold.machine import pick_device
from dpscaffold.privacy.ledger import spent
from dpscaffold.provision import (
    check_certificate,
    host_and_port,
    is_loopback,
    read_node_key,
    read_signing_key,
)
from dpscaffold.site.answer import Site
from dpscaffold.site.file import Mechanism, Policy, SiteFile, Terms, grant, judge, read_site_file
from dpscaffold.site.ledger import Booking, SiteLedger
from dpscaffold.site.memory import StateFolder
from dpscaffold.site.reading import check_data_table
from dpscaffold.site.recovery import recover
from dpscaffold.site.work import opener

THEOREM = "adaptive composition of n·K steps, whatever selection and stopping look at (bound cap)"


def start_site(path: Path, insecure: bool, echo: Callable[[str], None]) -> None:
    """Answer letters until SIGTERM or SIGINT; the participation in progress is finished and
    stored."""
    from dpscaffold.flower import check_proxy
    from dpscaffold.flower.node import Address, Fleet, serve

    file = read_site_file(path)
    check_proxy(file.server)
    if insecure and not is_loopback(host_and_port("server", file.server)[0]):
        raise BadInput("--insecure is for loopback alone; leave it out")
    if not insecure:
        check_certificate(file.ca)
    key, node_key = read_signing_key(file.signing_key), read_node_key(file.node_key)
    check_data_table(file.data, path.resolve().parent)
    os.umask(0o077)
    state = StateFolder(file.state, file.name)
    say = _logger(file, echo)
    SiteLedger(state.ledger, file.name)  # a damaged ledger is said now, not at the first letter
    device = pick_device(file.device)
    site = Site(
        file.name,
        file.coordinator,
        key,
        state,
        _live_policy(path, file.policy, say),
        opener(file, path.resolve().parent, device, say),
        share_slots=file.share_slots,
        log=say,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    address = Address(file.server, None if insecure else file.ca.read_bytes())
    fleet = Fleet(address, node_key, file.state / "node_id")
    echo(f"the site {file.name} starts; its policy is in {path}")
    try:
        serve(fleet, _watched(site, state), stop, say)
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


def _watched(site: Site, state: StateFolder) -> Callable[[Letter], Letter]:
    """Answers, with ``status.json`` kept beside."""
    counts = {"answered": 0}

    def answer(letter: Letter) -> Letter:
        began = time.perf_counter()
        answer = site.answer(letter)
        counts["answered"] += 1
        said = {
            "site": site.name,
            "process": os.getpid(),
            "last_letter": datetime.now(UTC).isoformat(timespec="seconds"),
            "last_kind": str(answer.header.get("kind", "")),
            "last_seconds": round(time.perf_counter() - began, 3),
            "answered": counts["answered"],
            "refusals": site.refusals,
        }
        (state.path / "status.json").write_text(json.dumps(said) + "\n")
        return answer

    return answer


def _logger(file: SiteFile, echo: Callable[[str], None]) -> Callable[[str], None]:
    """Sentences with their time, to the site's own log and to the terminal."""

    def say(sentence: str) -> None:
        line = f"{datetime.now(UTC).isoformat(timespec='seconds')} {sentence}"
        with (file.state / "site.log").open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        echo(sentence.splitlines()[-1] if sentence else "")

    return say


# --- check


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
    if connect:
        yield _connection(file)
    if offer is not None:
        yield _judged(path, file, offer)


def _connection(file: SiteFile) -> tuple[str, bool]:
    import httpx

    from dpscaffold.flower.node import Address, clock_of

    try:
        ahead = clock_of(Address(file.server, file.ca.read_bytes()))
    except (httpx.HTTPError, OSError, KeyError) as error:
        return f"{file.server} cannot be reached ({type(error).__name__}: {error})", False
    fine = -300 < ahead < 4
    return f"{file.server} answers; this clock is {ahead:+.0f} s from its own", fine


def _judged(path: Path, file: SiteFile, offer: Path) -> tuple[str, bool]:
    """What this site would answer to a plan; the ledger is read and not written."""
    from dpscaffold.serving import load_served

    raw = load_served(offer).offer().to_dict()
    try:
        work = opener(file, path.resolve().parent, torch.device("cpu"), print)(raw, file.policy)
        judge(file.policy, work.terms)
        ledger = SiteLedger(file.state / "ledger.jsonl", file.name)
        granted = grant(file.policy, work.terms, work.records, work.batch, ledger.left(file.policy))
    except Refused as no:
        return f"{offer} would be refused: {no}", False
    cost = "no privacy" if granted.epsilon is None else f"epsilon {granted.epsilon:.4g}"
    return (
        f"{offer} would be accepted: at most {granted.participations} participations, {cost} at "
        f"delta {granted.delta:.3g}, towards the server",
        True,
    )


# --- ledger


def ledger_of(path: Path) -> dict[str, Any]:
    """Per run and in total: granted, spent, left."""
    file = read_site_file(path)
    try:
        ledger = SiteLedger(file.state / "ledger.jsonl", file.name)
    except Refused as no:
        raise BadInput(f"the ledger cannot be read: {no.detail}") from no
    left = ledger.left(file.policy)
    runs = [_run_line(booking) for booking in ledger.runs.values() if not booking.released]
    protected = [run["epsilon_granted"] for run in runs]
    return {
        "site": file.name,
        "runs": runs,
        "recovered": [vars(lost) for lost in ledger.lost],
        "participations": ledger.total,
        "epsilon_booked": file.policy.epsilon - left.epsilon,
        "delta_booked": file.policy.delta - left.delta,
        "epsilon_left": left.epsilon,
        "delta_left": left.delta,
        "runs_left": max(0, left.runs),
        "promise": "no privacy: at least one run had none"
        if None in protected
        else "epsilon and delta add over runs (Rogers, Roth, Ullman, Vadhan 2016)",
        "theorem": THEOREM,
    }


def _run_line(booking: Booking) -> dict[str, Any]:
    account = booking.account
    line: dict[str, Any] = {
        "run": booking.run,
        "began": booking.began,
        "granted": booking.grant.participations,
        "participations": booking.participations,
        "left": booking.remaining,
        "epsilon_granted": booking.grant.epsilon,
        "epsilon_spent": None,
        "delta": booking.grant.delta,
        "neighbours": "no privacy",
        "first": booking.first_time,
        "last": booking.last_time,
    }
    if booking.grant.epsilon is not None:
        terms = Terms(**account["terms"], mechanism=Mechanism(**account["mechanism"]))
        run = terms.run(
            account["records"], account["batch"], booking.grant.delta, account["declared"]
        )
        line["epsilon_spent"] = spent(run, booking.participations, run.groups[0])
        line["neighbours"] = run.neighbours
    return line


def ledger_lines(said: dict[str, Any]) -> list[str]:
    """The ledger for people."""
    lines = [f"ledger of {said['site']}, towards the server; {said['theorem']}"]
    for run in said["runs"]:
        cost = "no privacy"
        if run["epsilon_granted"] is not None:
            cost = (
                f"ε spent {run['epsilon_spent']:.4g} of {run['epsilon_granted']:.4g} at "
                f"δ = {run['delta']:.3g} ({run['neighbours']})"
            )
        lines.append(
            f"run {run['run'][:8]}…: {run['participations']} of {run['granted']} participations, "
            f"{cost}" + ("" if run["began"] else "; never began")
        )
    for lost in said["recovered"]:
        lines.append(
            f"recovered {lost['time']}: {lost['participations']} participations, ε "
            f"{lost['epsilon']:.4g} booked as spent"
        )
    lines.append(
        f"in total: ε {said['epsilon_booked']:.4g} booked, {said['epsilon_left']:.4g} left; "
        f"{said['runs_left']} more runs; {said['promise']}"
    )
    return lines


def recover_site(path: Path) -> list[str]:
    """Book what cannot be accounted for; the site's process must not run."""
    file = read_site_file(path)
    state = StateFolder(file.state, file.name)
    try:
        return recover(state, file.name, file.policy)
    except Refused as no:
        raise BadInput(f"the state cannot be recovered: {no}") from no
    finally:
        state.close()


def status_of(path: Path) -> dict[str, Any]:
    """What the site's process last wrote, and whether it runs."""
    file = read_site_file(path)
    said: dict[str, Any] = {"site": file.name}
    written = file.state / "status.json"
    if written.exists():
        try:
            said |= json.loads(written.read_text())
        except ValueError:
            said["last_letter"] = "unknown"
    try:
        StateFolder(file.state, file.name).close()
        said["online"] = False
    except BadInput:
        said["online"] = True
    return said


def evaluate_site(path: Path, run: str | None) -> dict[str, Any]:
    """The final model on this site's own records: for its own eyes."""
    file = read_site_file(path)
    finished = [
        folder
        for folder in sorted((file.state / "runs").glob("*/model.box"), key=os.path.getmtime)
        if run is None or folder.parent.name == run
    ]
    if not finished:
        raise BadInput("no run that is over is known here; a model arrives at the end of a run")
    from dpscaffold.site.memory import RunMemory

    memory = RunMemory(finished[-1].parent)
    try:
        known, model = memory.enrolment(), memory.model()
        if known is None or model is None:
            raise BadInput("the run's files are not whole")
        open_work = opener(file, path.resolve().parent, torch.device("cpu"), lambda said: None)
        work = open_work(known.offer, file.policy)
    except Refused as no:
        raise BadInput(f"the run cannot be evaluated: {no}") from no
    params = torch.from_numpy(model.vectors["params"].copy())
    features = work.task.prepare(work.held.features)
    scores, labels = work.task.scores(params, features), work.held.labels
    said = {
        "run": known.run,
        "records": len(work.held),
        "loss": float(work.task.losses(params, features, labels).mean()),
    }
    if work.offer.rows.classes and scores.shape[1] > 1:
        said["accuracy"] = float((scores.argmax(dim=1) == labels).float().mean())
    return said
