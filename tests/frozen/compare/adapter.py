"""Today's package, asked in neutral words. Where its API changes, this file changes and no other
of the comparison.

The functions take what ``frozen/*.json`` has under ``given`` and answer with the keys that it has
under ``said``; a refusal is ``{"refused": code}``.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tomli_w

from dpscaffold import run as train_from
from dpscaffold.errors import BadInput
from dpscaffold.privacy import (
    ALONE,
    SERVER,
    Adversary,
    Cost,
    Facts,
    Ledger,
    Mechanism,
    Part,
    SecureSums,
    Statement,
    adversaries,
    describe,
    epsilon,
    epsilons_by_group,
    no_guarantee,
    noise_seen,
    state,
)
from dpscaffold.privacy.accounting import group_steps, step_epsilon
from dpscaffold.privacy.parts import allowed_in_parts, by_person, shared_draw
from dpscaffold.privacy.seeds import SeedKnowledge
from dpscaffold.runs import stating
from dpscaffold.runs.budget_file import BudgetFile, BudgetGrant
from dpscaffold.runs.ledger import read_account
from frozen import statements
from frozen.compare.configurations import RENAMES, renamed

Said = dict[str, Any]
VIEWS = ("server", "third_party", "participant")


def number(value: float | None) -> float | str | None:
    """A number of a JSON file, where infinity is a word."""
    if value is None:
        return None
    return float(value) if math.isfinite(value) else "infinite"


def attempted(ask: Callable[[], Any]) -> Any:
    """What was said, or the code of the refusal."""
    try:
        return ask()
    except BadInput as error:
        return {"refused": error.code}


def mechanism(given: Mapping[str, Any]) -> Mechanism:
    """The package's own description of a neutral one; a cap of participations is one reason to
    decline."""
    kinds = given["users"]

    def each(key: str) -> list[Any]:
        return [kind[key] for kind in kinds for _ in range(kind["count"])]

    noise, sums = each("noise"), given["secure_sums"]
    least = min(noise)
    capped = "most_participations" if given["most_participations"] is not None else None
    return describe(
        rounds=given["rounds"],
        local_steps=given["local_steps"],
        users=sum(kind["count"] for kind in kinds),
        cohort_size=given["cohort"],
        records=each("size"),
        batch_sizes=each("batch"),
        noise=least,
        clip=given["clip"],
        sampling=given["sampling"],
        unit=given["unit"],
        memory=given["memory"],
        # a mean of uploads that were scaled down is no sum of them
        one_sum=given["linear_uploads"] and given["server_mean"] == "mean",
        weighting=given["weighting"],
        delta=given["delta"],
        declines=given["may_decline"] or capped,
        declared_sizes=given["declared_sizes"],
        unproved_hooks=tuple(given["unproved"]),
        query={"gradients": "gradients", "bounded-sums": "sums"}[given["release"]],
        secure=SecureSums(sums["colluders"], sums["least"]) if sums else None,
        extra=given["void_attempts"],
        louder=[one / least for one in noise] if least and len(set(noise)) > 1 else None,
        weights=each("weight") if given["weighting"] == "noise" else None,
    )


def prepared(given: Mapping[str, Any], sampling: str) -> tuple[Cost, ...]:
    """Further mechanisms on the same records, for the neighbours of the run."""
    found = []
    for place, one in enumerate(given["prepared"]):
        cost = Cost(
            f"prepared {place}",
            noise=one.get("noise"),
            epsilon=one.get("epsilon"),
            delta=one.get("delta", 0.0),
            add_remove=one.get("noise_if_added"),
            alone=one.get("own_share", 1.0),
        ).under(sampling)
        assert cost is not None  # every one is given for both neighbours
        found.append(cost)
    return tuple(found)


def capped(run: Mechanism, given: Mapping[str, Any], who: Adversary, costs: Any) -> Any:
    """ε if every user took part as often as it may."""
    most = min(run.rounds, given["most_participations"] or run.rounds) + run.extra
    return attempted(lambda: number(epsilon(run, who, times=most, costs=costs)))


def of_mechanism(given: Mapping[str, Any]) -> Said:
    """ε towards each adversary, and what participations cost."""
    run = attempted(lambda: mechanism(given))
    if isinstance(run, dict):
        return run
    if given["most_participations"] == 0:
        return {"refused": "not-expressible"}
    if reason := no_guarantee(run):
        return {"refused": "no-guarantee", "reason": reason}
    costs, rounds = prepared(given, run.sampling), given["completed"]
    run = replace(run, extra=max(run.extra, sum(given["repeated_rounds"])))
    known, said = adversaries(run), {}
    try:
        known = adversaries(run, given["pooling_participants"])
    except BadInput as error:
        said["participant"] = {"refused": error.code}
        del known["participant"]
    own = tuple(cost.if_others_collude for cost in costs)
    for view, who in known.items():
        paid = own if who == ALONE else costs
        said[view] = attempted(
            lambda who=who, paid=paid: number(epsilon(run, who, rounds, costs=paid))
        )
    said["cap"] = capped(run, given, SERVER, costs)
    if run.secure is not None:
        proved = noise_seen(run, known["server"]).not_more is None
        said["cap_in_sums"] = {"refused": "own-noise-only"}
        if proved:
            said["cap_in_sums"] = capped(run, given, known["server"], costs)
    if len(run.groups) > 1:
        said["by_kind_of_user"] = attempted(
            lambda: [number(e) for e in epsilons_by_group(run, known["server"], rounds, costs)]
        )
    for times in given["participations"]:
        said[f"given_{times}"] = _spent(run, known["server"], times, costs)
        if run.secure is not None:
            said[f"alone_given_{times}"] = _spent(run, ALONE, times, own)
    return said


def _spent(run: Mechanism, who: Adversary, times: int, costs: tuple[Cost, ...]) -> Any:
    """ε of each group's users, given that they took part this often."""
    steps = group_steps(run, who)
    return attempted(
        lambda: [number(step_epsilon(run, who, step, None, times, costs)) for step in steps]
    )


def ledger_of(run: Mechanism, events: Any, budget: float | None, costs: Any = ()) -> Ledger:
    """Who took part, as the package counts it."""
    ledger = Ledger(run, budget, costs)
    for event in events:
        ledger.record(event["round"], event["users"], again=event["again"])
    return ledger


def of_history(given: Mapping[str, Any]) -> Said:
    """What a history has cost, and who may take part next."""
    answer = {
        "one": one_history,
        "parts": parted_history,
        "continued": parted_history,
        "together": several_runs,
        "budget-file": shared_budget,
    }[given["kind"]]
    said: Said = attempted(lambda: answer(given))
    return said


def one_history(given: Mapping[str, Any]) -> Said:
    """A run that was planned once."""
    run = mechanism(given["mechanism"])
    costs = prepared(given["mechanism"], run.sampling)
    ledger = ledger_of(run, given["events"], given["user_epsilon"], costs)
    said: Said = {
        "participations": ledger.participations.tolist(),
        "largest": attempted(lambda: number(ledger.largest())),
        "each": attempted(lambda: [number(e) for e in ledger.epsilons()]),
        "allowed": attempted(lambda: ledger.allowed(given["asked"])),
    }
    if run.secure is not None:
        said["alone_largest"] = attempted(lambda: number(ledger.largest(ALONE)))
    released = replace(run, extra=ledger.released.extra)
    for view, who in adversaries(run).items():
        said[view] = attempted(
            lambda who=who: number(epsilon(released, who, ledger.rounds, costs=costs))
        )
    said["cap"] = capped(released, given["mechanism"], SERVER, costs)
    return said


def parted_history(given: Mapping[str, Any]) -> Said:
    """A run that was given more rounds, or that continues another one."""
    runs = [mechanism(part["mechanism"]) for part in given["parts"]]
    costs = prepared(given["parts"][0]["mechanism"], runs[0].sampling)
    continued = given["kind"] == "continued"
    parts = []
    for place, (run, part) in enumerate(zip(runs, given["parts"], strict=True)):
        ledger = ledger_of(run, part["events"], given["user_epsilon"])
        people = tuple(given["people"][place]) if continued else ()
        paid = () if place else costs
        parts.append(
            Part(ledger.run, ledger.rounds, ledger, paid, data="x", source="x", people=people)
        )
    facts = Facts(
        seeded=given["seed_is_public"],
        draw_given=given["draw_was_chosen"],
        cap=given["cap"] if continued else 0,
    )
    said = numbers_of(state(parts, facts))
    if "refused" in said:
        return said
    begun = [k for k, part in enumerate(parts) if k == 0 or part.rounds]
    if "by_group" in said:
        groups = said.pop("by_group")
        said["by_user"] = [groups[runs[-1].place(user)] for user in range(runs[-1].users)]
    each = [parts[k].charged().participations for k in begun]
    people = [given["people"][k] for k in begun] if continued else ()
    counts = np.bincount(by_person(each, people))
    said["users_by_participations"] = {str(n): int(counts[n]) for n in np.flatnonzero(counts)}
    planned = (epsilon(p.run, p.against("server"), costs=p.costs) for p in parts if p.rounds)
    said["as_planned"] = number(math.fsum(planned))
    if not continued:
        asked = given["asked"]
        said["allowed"] = attempted(lambda: allowed_in_parts(parts, len(parts) - 1, asked))
    return said


def numbers_of(whole: Statement) -> Said:
    """The numbers of a statement."""
    said: Said = {"delta": whole.delta}
    if not whole.guarantee:
        return {"refused": "no-guarantee", "reason": whole.reason}
    for one in whole.guarantees:
        name = one.adversary
        said[name] = number(one.epsilon)
        said[f"{name}_given_the_draw"] = number(one.given)
        relation = whole.run.relation if whole.run else ""
        replaced = one.epsilon if relation == "replace-one" else one.replace_one
        said[f"{name}_replace_one"] = number(replaced)
    server = whole.towards("server")
    said["given_the_draw"] = number(server.given)
    if whole.by_group and whole.run is not None:
        said["by_group"] = list(whole.by_group)
    said["quoted"] = number(whole.epsilon)
    said["quoted_towards"] = "everybody" if whole.quotes_given else "server"
    return said


def several_runs(given: Mapping[str, Any]) -> Said:
    """Several runs over the same records."""
    parts = []
    for place, one in enumerate(given["runs"]):
        run = mechanism(one["mechanism"])
        ledger = ledger_of(run, one["events"], None)
        parts.append(
            Part(
                run,
                ledger.rounds,
                ledger,
                prepared(one["mechanism"], run.sampling),
                f"run {place}",
                one["secret"],
                SeedKnowledge(**one["seed"]),
                "the records" if given["same_records"] else None,
            )
        )
    chosen = any(part.secret and part.drawn.given for part in parts)
    facts = Facts(draw_given=chosen, fixed_in_advance=given["fixed_in_advance"])
    whole = state(parts, facts)
    said: Said = {"delta": sum(part.run.delta for part in parts)}
    for view in VIEWS:
        said[view] = number(whole.towards(view).epsilon)
    said["ledger"] = number(whole.towards("server").given)
    towards = "ledger" if whole.quotes_given else "server"
    said["quoted_towards"] = towards if whole.guarantee else None
    said["draws_are_shared"] = whole.reason is not None or shared_draw(parts) is not None
    return said


def shared_budget(given: Mapping[str, Any]) -> Said:
    """What a budget file granted and refused, step by step."""
    with TemporaryDirectory() as folder:
        file = BudgetFile.open(Path(folder, "budget.jsonl"), given["epsilon"], given["delta"])
        steps = [_step(file, dict(step)) for step in given["steps"]]
        contents = file.read()
        return {
            "steps": steps,
            "spent": list(contents.spent),
            "left": list(contents.left),
            "rounds": dict(contents.participations),
        }


def _step(file: BudgetFile, step: Said) -> str:
    try:
        if "round" in step:
            file.participate(step["run"], step["round"], after=step["after"])
        else:
            step["noise_seed"] = step.pop("seed")
            file.reserve(BudgetGrant(**step))
    except BadInput as error:
        return error.code
    return "granted"


#: The names that version 0.2.0's caveats have, by the codes of today's statements.
CAVEATS = {
    "metrics": "metrics",
    "tuning": "tuning",
    "seed": "seed-is-public",
    "blind": "stopping",
    "single-uploads": "single-uploads",
    "simulated-sums": "simulated-sums",
    "large-delta": "large-delta",
    "allowed": "released-all-the-same",
    "preparation": "preparation",
}


def of_statement(given: Mapping[str, Any]) -> Said:
    """The statement of a configuration: of its plan, or of the runs of its steps."""
    with TemporaryDirectory() as folder:
        text = json.dumps(given["config"]).replace("{folder}", folder)
        renames = tomllib.loads(RENAMES.read_text(encoding="utf-8"))
        config = renamed(json.loads(text), {**renames, "defaults": {}})
        Path(folder, "visits.csv").write_text(statements.table(), encoding="utf-8")
        if given["budget"]:
            BudgetFile.open(Path(folder, "budget.jsonl"), **given["budget"])
        try:
            whole = stated(config, given["steps"], Path(folder))
        except BadInput as error:
            return {"refused": error.code, "reason": str(error).replace(folder, "{folder}")}
        said = {"simulated": whole.seeded, "rounds": whole.rounds, **numbers_of(whole)}
        if given["budget"]:
            spent_of_file = BudgetFile(Path(folder, "budget.jsonl")).read().spent
            said["reserved_epsilon"], said["reserved_delta"] = spent_of_file
    if whole.run is not None:
        said["neighbours"] = whole.run.relation
    open_ends = (*whole.outside, *whole.needs)
    said["caveats"] = sorted({CAVEATS.get(code, code) for code, _ in open_ends})
    said["preparation"] = [step.protection for step in whole.preparation]
    return said


def stated(config: Said, steps: Sequence[Said], folder: Path) -> Statement:
    """What a plan promises, or what the folder of a run says after the last step."""
    if not steps:
        path = folder / "plan.toml"
        path.write_text(tomli_w.dumps(config), encoding="utf-8")
        return stating.state(path)
    out = folder / "run"
    for place, changes in enumerate(steps):
        given = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        train_from(config, given, out=out, resume=place > 0)
    if "privacy" not in config:
        return state(())
    return read_account(out).statement()
