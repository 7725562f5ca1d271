"""What a site's people ask of its files: ledger, recovery, status."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dpscaffold.config.gaussian import NoisedStep
from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.site.file import Terms, read_site_file
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.memory import StateFolder
from dpscaffold.deployment.site.recovery import recover
from dpscaffold.deployment.site.secure import sums_of
from dpscaffold.errors import BadInput
from dpscaffold.privacy.accounting import spent
from dpscaffold.privacy.numbers import round_up

THEOREM = "adaptive composition of n·K steps, whatever selection and stopping look at (bound cap)"


def ledger_of(path: Path) -> dict[str, Any]:
    """Per run and in total: granted, spent, left."""
    file = read_site_file(path)
    try:
        ledger = SiteLedger(file.state / "ledger.jsonl", file.name)
    except Refused as no:
        raise BadInput("ledger-damaged", f"the ledger cannot be read: {no.detail}") from no
    left = ledger.left(file.policy)
    runs = [_run_line(entry) for entry in ledger.runs.values() if not entry.released]
    protected = [run["epsilon_granted"] for run in runs]
    return {
        "site": file.name,
        "runs": runs,
        "recovered": [vars(lost) for lost in ledger.lost],
        "participations": ledger.total,
        "epsilon_reserved": file.policy.epsilon - left.epsilon,
        "delta_reserved": file.policy.delta - left.delta,
        "epsilon_left": left.epsilon,
        "delta_left": left.delta,
        "runs_left": max(0, left.runs),
        "promise": "no privacy: at least one run had none"
        if None in protected
        else "epsilon and delta add over runs (Rogers, Roth, Ullman, Vadhan 2016)",
        "theorem": THEOREM,
    }


def _run_line(entry: GrantedRun) -> dict[str, Any]:
    account = entry.account
    line: dict[str, Any] = {
        "run": entry.run,
        "began": entry.began,
        "granted": entry.grant.participations,
        "participations": entry.participations,
        "left": entry.remaining,
        "epsilon_granted": entry.grant.epsilon,
        "epsilon_spent": None,
        "delta": entry.grant.delta,
        "neighbours": "no privacy",
        "first": entry.first_time,
        "last": entry.last_time,
        "continues": entry.continues,
        "continued": entry.continued,
        "before": entry.before,
    }
    if entry.grant.epsilon is not None and account["mechanism"] is None:
        # What was released is not a mechanism of this version: all of its ε counts as spent.
        unknown = {"neighbours": "any change of this site's records", "query": None}
        return line | unknown | {"epsilon_spent": entry.grant.epsilon}
    if entry.grant.epsilon is not None:
        terms = Terms(
            **account["terms"],
            mechanism=NoisedStep(**account["mechanism"]),
            sums=sums_of(entry),
        )
        facts = (account["records"], account["batch"], entry.grant.delta, account["declared"])
        run = terms.run(*facts)
        line["epsilon_spent"] = spent(run, entry.used)
        line["neighbours"] = run.neighbours
        line["query"] = run.query
        if terms.sums is not None:
            alone = terms.run_alone(*facts)
            line["colluders"] = terms.sums.colluders
            line["voids"] = entry.voids
            line["epsilon_alone_granted"] = entry.grant.epsilon_alone
            line["epsilon_alone_spent"] = spent(alone, entry.participations)
    return line


def ledger_lines(said: dict[str, Any]) -> list[str]:
    """The ledger for people."""
    lines = [f"ledger of {said['site']}, towards the server; {said['theorem']}"]
    for run in said["runs"]:
        cost = "no privacy"
        if run["epsilon_granted"] is not None:
            spent, granted = round_up(run["epsilon_spent"]), round_up(run["epsilon_granted"])
            cost = f"ε spent {spent} of {granted} at δ = {run['delta']:.3g} ({run['neighbours']})"
            cost += " for bounded sums" if run["query"] == "sums" else ""
            if "colluders" in run:
                cost += (
                    f" towards the server and {run['colluders']} sites through secure sums, "
                    f"{round_up(run['epsilon_alone_spent'])} of "
                    f"{round_up(run['epsilon_alone_granted'])} if all others collude"
                )
        lines.append(f"run {run['run'][:8]}…: {_course(run, cost)}")
    for lost in said["recovered"]:
        lines.append(
            f"recovered {lost['time']}: {lost['participations']} participations, ε "
            f"{round_up(lost['epsilon'])} recorded as spent"
        )
    left = math.floor(said["epsilon_left"] * 1000) / 1000  # never more than there is
    lines.append(
        f"in total: ε {round_up(said['epsilon_reserved'])} reserved, {left} left; "
        f"{said['runs_left']} more runs; {said['promise']}"
    )
    return lines


def _course(run: dict[str, Any], cost: str) -> str:
    """How a run in the ledger stands."""
    used = run["before"] + run["participations"]
    took = f"{used} of {run['granted']} participations"
    if run["continued"]:
        return (
            f"{run['participations']} participations; it went on as run "
            f"{run['continued'][:8]}…, which has its grant"
        )
    if run["continues"] and not run["began"]:
        return f"offered as the rest of run {run['continues'][:8]}…; never began, and costs nothing"
    if run["continues"]:
        took += f", {run['before']} of them before, as run {run['continues'][:8]}…"
    return f"{took}, {cost}" + ("" if run["began"] else "; never began")


def recover_site(path: Path) -> list[str]:
    """Count what cannot be accounted for as spent; the site's process must not run."""
    file = read_site_file(path)
    state = StateFolder(file.state, file.name)
    try:
        return recover(state, file.name, file.policy)
    except Refused as no:
        raise BadInput("state-damaged", f"the state cannot be recovered: {no}") from no
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
            said["last_message"] = "unknown"
    try:
        StateFolder(file.state, file.name).close()
        said["online"] = False
    except BadInput:
        said["online"] = True
    return said
