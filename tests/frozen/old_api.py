"""What the package says of neutral descriptions, in the words of the API of version 0.2.0.

``python -m frozen.old_api KIND < inputs.json > outputs.json`` runs in ``.venv-old``. This file
never changes with the product: what today's package says is asked by ``compare/adapter.py``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w

from dpscaffold import run as train_from
from dpscaffold.cli.subject import Numbers, from_source
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Ledger, Mechanism, PrivacyError, describe, statement
from dpscaffold.privacy.adding import ContinuedParts, statement_of_parts
from dpscaffold.privacy.bound import no_guarantee
from dpscaffold.privacy.bounds import (
    CAP,
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    SECURE_CAP,
    bound_for,
)
from dpscaffold.privacy.by_user import epsilons_by_group
from dpscaffold.privacy.composition import RunPart, allowed_in_parts, together
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.drawn import SeedKnowledge
from dpscaffold.privacy.ledger import spent
from dpscaffold.privacy.mechanism import SecureTerms
from dpscaffold.privacy.statement_types import Statement
from dpscaffold.runs.budget_file import BudgetFile, BudgetGrant, BudgetRound
from dpscaffold.runs.ledger import read_account
from frozen import statements

Said = dict[str, Any]


def number(value: float | None) -> float | str | None:
    """A number of a JSON file, where infinity is a word."""
    if value is None:
        return None
    return float(value) if math.isfinite(value) else "infinite"


def mechanism(given: Mapping[str, Any]) -> Mechanism:
    """The package's own description of a neutral one."""
    kinds = given["users"]
    users = sum(kind["count"] for kind in kinds)

    def each(key: str) -> list[Any]:
        return [kind[key] for kind in kinds for _ in range(kind["count"])]

    noise = each("noise")
    least = min(noise)
    sums = given["secure_sums"]
    return describe(
        rounds=given["rounds"],
        local_steps=given["local_steps"],
        users=users,
        cohort_size=given["cohort"],
        records=each("size"),
        batch_sizes=each("batch"),
        noise=least,
        clip=given["clip"],
        sampling=given["sampling"],
        unit=given["unit"],
        memory=given["memory"],
        one_sum=given["linear_uploads"],
        weighting=given["weighting"],
        delta=given["delta"],
        max_participations=given["most_participations"],
        may_decline=given["may_decline"],
        hidden_draw=given["draw_is_hidden"],
        declared_sizes=given["declared_sizes"],
        unproved_hooks=given["unproved"],
        query={"gradients": "gradients", "bounded-sums": "sums"}[given["release"]],
        secure=SecureTerms(sums["colluders"], sums["least"]) if sums else None,
        voids=given["void_attempts"],
        louder=[one / least for one in noise] if least and len(set(noise)) > 1 else None,
        weights=each("weight") if given["weighting"] == "noise" else None,
        aggregation=given["server_mean"],
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


def attempted(ask: Callable[[], Any]) -> Any:
    """What was said, or the code of the refusal."""
    try:
        return ask()
    except PrivacyError as error:
        return {"refused": error.code}


def of_mechanism(given: Mapping[str, Any]) -> Said:
    """ε towards each adversary, by which bound, and what participations cost."""
    run = attempted(lambda: mechanism(given))
    if isinstance(run, dict):
        return run
    said: Said = {"stored": run.to_dict()}
    if reason := no_guarantee(run):
        return {**said, "refused": "no-guarantee", "reason": reason}
    costs = prepared(given, run.sampling)
    rounds, repeats = given["completed"], tuple(given["repeated_rounds"])
    colluders = given["pooling_participants"]
    for view in ("server", "third_party", "participant"):
        bound = attempted(lambda view=view: bound_for(run, view, repeats, colluders))
        if isinstance(bound, dict):
            said[view] = bound
            continue
        said[f"{view}_by"] = bound.name
        said[view] = attempted(
            lambda bound=bound: number(bound.epsilon(run, rounds, costs, repeats))
        )
    alone = tuple(cost.if_others_collude for cost in costs)
    if run.secure is not None:
        said["alone"] = attempted(
            lambda: number(RANDOM_PARTICIPATION.epsilon(run, rounds, alone, repeats))
        )
        said["cap_in_sums"] = attempted(
            lambda: number(SECURE_CAP.epsilon(run, None, costs, repeats))
        )
    said["cap"] = attempted(lambda: number(CAP.epsilon(run, None, costs, repeats)))
    if len(run.groups) > 1:
        server = bound_for(run, "server", repeats, colluders)
        said["by_kind_of_user"] = attempted(
            lambda: [number(e) for e in epsilons_by_group(server, run, rounds, costs, repeats)]
        )
    for times in given["participations"]:
        said[f"given_{times}"] = attempted(
            lambda times=times: [number(spent(run, times, group, costs)) for group in run.groups]
        )
        if run.secure is not None:
            own = replace(run, secure=None)
            said[f"alone_given_{times}"] = attempted(
                lambda own=own, times=times: [
                    number(spent(own, times, group, alone)) for group in own.groups
                ]
            )
    said["published"] = attempted(lambda: number(PAPER_THIRD_PARTY.epsilon(run, rounds, costs)))
    return said


VIEWS = ("server", "third_party", "participant")


def ledger_of(run: Mechanism, events: list[Said], budget: float | None, costs: Any) -> Ledger:
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
        alone = ledger.without_secure_sums()
        said["alone_largest"] = attempted(lambda: number(alone.largest()))
    for view in VIEWS:
        said[view] = attempted(
            lambda view=view: number(
                bound_for(run, view, ledger.repeats).epsilon(
                    run, ledger.rounds, costs, ledger.repeats
                )
            )
        )
    said["cap"] = attempted(lambda: number(CAP.epsilon(run, None, costs, ledger.repeats)))
    return said


def parted_history(given: Mapping[str, Any]) -> Said:
    """A run that was given more rounds, or that continues another one."""
    runs = [mechanism(part["mechanism"]) for part in given["parts"]]
    costs = prepared(given["parts"][0]["mechanism"], runs[0].sampling)
    ledgers = [
        ledger_of(run, part["events"], given["user_epsilon"], ())
        for run, part in zip(runs, given["parts"], strict=True)
    ]
    continued = None
    if given["kind"] == "continued":
        continued = ContinuedParts(tuple(map(tuple, given["people"])), given["cap"])
    whole = statement_of_parts(
        ledgers,
        seed_public=given["seed_is_public"],
        draw_given=given["draw_was_chosen"],
        extra_costs=costs,
        groups=(10,),
        continued=continued,
    )
    said = numbers_of(whole)
    if continued is None:
        said["allowed"] = attempted(
            lambda: allowed_in_parts(ledgers, len(ledgers) - 1, costs, given["asked"])
        )
    return said


def numbers_of(whole: Statement) -> Said:
    """The numbers of a statement."""
    said: Said = {"delta": whole.delta}
    if not whole.guarantee:
        return {"refused": "no-guarantee", "reason": whole.reason}
    for view in (*VIEWS, "alone"):
        if view == "alone" and whole.alone is None:
            continue
        towards = whole.towards(view)
        said[view] = number(towards.epsilon)
        said[f"{view}_given_the_draw"] = number(towards.ledger)
        said[f"{view}_replace_one"] = number(towards.replace_one)
        said[f"{view}_by"] = towards.bound
    if whole.ledger is not None:
        said["given_the_draw"] = number(whole.ledger.epsilon)
        said["users_by_participations"] = {
            str(times): users for times, users in (whole.ledger.participations or {}).items()
        }
    if whole.planned is not None:
        said["as_planned"] = number(whole.planned.epsilon)
    if whole.by_user is not None:
        said["by_user"] = [number(one) for one in whole.by_user.epsilon]
    said["quoted"] = number(whole.quoted_epsilon)
    said["quoted_towards"] = whole.quoted.towards if whole.quoted else None
    said["cap"] = next((number(row.epsilon) for row in whole.bounds if row.name == "cap"), None)
    return said


def several_runs(given: Mapping[str, Any]) -> Said:
    """Several runs over the same records."""
    runs = []
    for place, one in enumerate(given["runs"]):
        run = mechanism(one["mechanism"])
        ledger = ledger_of(run, one["events"], None, ())
        bounds = {view: bound_for(run, view, ledger.repeats) for view in VIEWS}
        runs.append(
            RunPart(
                f"run {place}",
                run,
                ledger.rounds,
                bounds,
                ledger,
                prepared(one["mechanism"], run.sampling),
                one["secret"],
                SeedKnowledge(**one["seed"]),
                "the records" if given["same_records"] else None,
            )
        )
    joint = together(runs, given["fixed_in_advance"], groups=(10,))
    return {
        "delta": joint.delta,
        **{view: number(value) for view, value in joint.epsilon.items()},
        "quoted_towards": joint.quoted,
        "draws_are_shared": joint.reason is not None,
    }


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
            file.participate(BudgetRound(step["run"], step["round"]), after=step["after"])
        else:
            step["noise_seed"] = step.pop("seed")
            file.reserve(BudgetGrant(**step))
    except BadInput as error:
        return error.code
    return "granted"


def of_statement(given: Mapping[str, Any]) -> Said:
    """The statement of a configuration: of its plan, or of the runs of its steps."""
    with TemporaryDirectory() as folder:
        text = json.dumps(given["config"]).replace("{folder}", folder)
        config = json.loads(text)
        Path(folder, "visits.csv").write_text(statements.table(), encoding="utf-8")
        if given["budget"]:
            BudgetFile.open(Path(folder, "budget.jsonl"), **given["budget"])
        try:
            whole = stated(config, given["steps"], Path(folder))
        except BadInput as error:
            return {"refused": error.code, "reason": str(error).replace(folder, "{folder}")}
        except PrivacyError as error:
            return {"refused": error.code, "reason": str(error)}
        said = {"simulated": whole.simulated, "rounds": whole.rounds, **numbers_of(whole)}
        if given["budget"]:
            spent_of_file = BudgetFile(Path(folder, "budget.jsonl")).read().spent
            said["reserved_epsilon"], said["reserved_delta"] = spent_of_file
    if whole.mechanism is not None:
        said["neighbours"] = whole.mechanism.relation
        said["noise"] = whole.mechanism.noise
    said["caveats"] = sorted({statements.caveat(sentence) for sentence in whole.outside})
    said["sentences"] = list(whole.outside)
    said["preparation"] = [step.protection for step in whole.preparation]
    return said


def stated(config: Said, steps: list[Said], folder: Path) -> Statement:
    """What a plan promises, or what the folder of a run says after the last step."""
    if not steps:
        path = folder / "plan.toml"
        path.write_text(tomli_w.dumps(config), encoding="utf-8")
        return from_source(path, Numbers(), None).statement()
    out = folder / "run"
    for place, changes in enumerate(steps):
        train_from(config, changes, out=out, resume=place > 0)
    if "privacy" not in config:
        return statement(None)
    return read_account(out).statement()


KINDS: dict[str, Callable[[Mapping[str, Any]], Said]] = {
    "mechanisms": of_mechanism,
    "histories": of_history,
    "statements": of_statement,
}


def main() -> None:
    """Answer a list of neutral descriptions of one kind, in their order."""
    ask = KINDS[sys.argv[1]]
    json.dump([ask(given) for given in json.load(sys.stdin)], sys.stdout, allow_nan=False)


if __name__ == "__main__":
    main()
