"""What a site books for an offer, in the words of the API of version 0.2.0.

:file:`offers.json.gz` has every offer, and every set of terms, that tests of version 0.2.0 put to a
site, and what the site answered. The tests of that version recorded them, in a tree of its own::

    FROZEN_OFFERS=recorded.json pytest -p frozen.offers tests/deploy tests/sums
    python -m frozen.offers recorded.json

``given`` has the site's policy, the terms, the size of its table and what is left of its budget;
``offer`` and ``members`` too where the terms were taken from an offer.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dpscaffold.config.gaussian import NoisedStep
from dpscaffold.deployment.protocol.agreement import read_offer
from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.site import file, secure
from dpscaffold.deployment.site.file import (
    Policy,
    RemainingBudget,
    SecurePolicy,
    SiteGrant,
    SumTerms,
    Terms,
    spare,
)
from dpscaffold.deployment.site.work import OfferedWork, build_task
from dpscaffold.privacy.accounting import spent
from frozen import make

Said = dict[str, Any]


def of_offer(given: Mapping[str, Any], participations: int | None = None) -> Said:
    """What a site says to an offer or to terms: a refusal, or what it books.

    ``epsilon`` and ``alone`` are those of ``participations``, so that two packages can be compared
    that permit different numbers; without it, of as many as the site permits.
    """
    policy, terms = _policy(given), _terms(given["terms"])
    said: Said = {}
    try:
        if "offer" in given:
            terms = _derived(given, policy)
            said["terms"] = _plain(terms)
        file.check_terms(policy, terms)
        if "left" not in given:
            return {**said, "allowed": True}
        left = RemainingBudget(**given["left"])
        size = (given["records"], given["batch"])
        most = min(terms.rounds + spare(terms), given["policy"].get("max_participations", 10**9))
        granted = file.grant(policy, terms, *size, left, given["declared"], most=most)
    except Refused as no:
        return {**said, "refused": no.code}
    return {**said, **_booked(granted, policy, terms, given, participations)}


def _booked(
    granted: SiteGrant,
    policy: Policy,
    terms: Terms,
    given: Mapping[str, Any],
    participations: int | None,
) -> Said:
    count = granted.participations if participations is None else participations
    epsilon, alone = granted.epsilon, granted.epsilon_alone
    size = (given["records"], given["batch"], policy.run_delta, given["declared"])
    if epsilon is not None:
        run = terms.run(*size)
        epsilon = spent(run, count)
    if alone is not None:
        run = terms.run_alone(*size)
        alone = spent(run, count)
    return {
        "participations": granted.participations,
        "epsilon": epsilon,
        "alone": alone,
        "delta": granted.delta,
    }


def _derived(given: Mapping[str, Any], policy: Policy) -> Terms:
    """The terms of an offer, as a site takes them from it."""
    offer = read_offer(_steps_of_today(given["offer"]))
    held: Any = None  # the records themselves change no terms
    size = (given["records"], given["declared"])
    parts = (offer, build_task(offer, policy), offer.build_algorithm())
    work = OfferedWork(*parts, held, *size, torch.device("cpu"), given["site"])
    members: Any = None
    if "members" in given:
        sizes = tuple(given["members"]["sizes"])
        members = SimpleNamespace(names=tuple(given["members"]["names"]), sizes=sizes)
    return secure.summed(work, given["site"], members, policy)


def _steps_of_today(offer: Mapping[str, Any]) -> Said:
    """The offer, with columns and classes by name or by number, fitted steps by the name that they
    have now, and public constants as those of a step with public statistics. Keys that a step did
    not use are left out."""
    rows = dict(offer["rows"])
    rows["features"] = rows.pop("columns", ()) or rows["features"]
    rows["classes"] = rows.pop("class_names", ()) or rows["classes"]
    rows["prepare"] = [_step_of_today(step) for step in rows["prepare"]]
    made = {**offer, "rows": rows}
    if "fit" in offer:
        made["fit"] = _step_of_today(offer["fit"])
    return made


def _step_of_today(old: Mapping[str, Any]) -> Said:
    step = {key: value for key, value in old.items() if value is not None}
    if step["step"] == "project" or "spent" in step:
        return {**step, "step": "fitted"}
    if step["step"] != "shift":
        return step
    if "factor" not in step:
        return {"step": "centre", "fit": "public", "mean": step["mean"]}
    deviation = [1 / one for one in step["factor"]]
    return {"step": "standardise", "fit": "public", "mean": step["mean"], "deviation": deviation}


def _policy(given: Mapping[str, Any]) -> Policy:
    """The policy, in the words of today: an ε of one run is a share of all, and one key allows
    rehearsals and runs without privacy. What other keys that are gone refused would be allowed, and
    the comparison shows it."""
    sums, old = given["secure"], given["policy"]
    open_to = "unprotected" if given["terms"]["mechanism"] is None else "rehearsal"
    known = {k: v for k, v in old.items() if k in Policy.model_fields}
    if old.get("run_epsilon") is not None:
        known["epsilon"] = min(1e6, old["run_epsilon"] * old["max_runs"])
    known["units"] = (*old["units"], *["none"] * old[open_to])
    return Policy(**known).with_secure(None if sums is None else SecurePolicy(**sums))


def _terms(plain: Mapping[str, Any]) -> Terms:
    mechanism, sums = plain["mechanism"], plain["sums"]
    if mechanism is not None:
        mechanism = NoisedStep(**_known(NoisedStep, mechanism))
    given = {
        **_known(Terms, plain),
        "unproved": tuple(plain["unproved"]),
        "mechanism": mechanism,
        "sums": None if sums is None else SumTerms(**sums),
    }
    return Terms(**given)


def _known(kind: Any, given: Mapping[str, Any]) -> Said:
    """What a dataclass or a table has a field for."""
    names = getattr(kind, "model_fields", None) or {field.name for field in fields(kind)}
    return {key: value for key, value in given.items() if key in names}


def _plain(terms: Terms) -> Said:
    """Terms as a JSON file has them."""
    kept = {
        **vars(terms),
        "mechanism": None if terms.mechanism is None else terms.mechanism.stored(),
        "sums": None if terms.sums is None else vars(terms.sums),
    }
    return dict(json.loads(json.dumps(kept)))


# --- recording: a plugin of pytest, where FROZEN_OFFERS names a file


class Recorder:
    """Stands in for the functions through which every offer goes, and notes what they are given."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: dict[str, dict[str, Any]] = {}
        self.test = ""
        self._taken: tuple[Terms, Said] | None = None

    def install(self) -> None:
        """Replace the functions wherever they were imported."""
        for old, new in (
            (secure.summed, self.summed(secure.summed)),
            (file.check_terms, self.checked(file.check_terms)),
            (file.grant, self.granted(file.grant)),
        ):
            for module in list(sys.modules.values()):
                ours = getattr(module, "__name__", "").startswith("dpscaffold")
                if ours and getattr(module, old.__name__, None) is old:
                    setattr(module, old.__name__, new)

    def summed(self, take: Callable[..., Terms]) -> Callable[..., Terms]:
        """Remember which offer the terms are of."""

        @functools.wraps(take)
        def taken(work: Any, name: str, members: Any, policy: Policy) -> Terms:
            terms = take(work, name, members, policy)
            if isinstance(work, OfferedWork):
                given: Said = {"offer": work.offer.to_dict(), "site": name}
                given |= {"records": work.records, "declared": work.declared}
                if members is not None:
                    given["members"] = {"names": members.names, "sizes": members.sizes}
                self._taken = (terms, given)
            return terms

        return taken

    def checked(self, check: Callable[..., None]) -> Callable[..., None]:
        """Note terms that are refused at once; the others come to a grant, or to nothing."""

        @functools.wraps(check)
        def checking(policy: Policy, terms: Terms) -> None:
            try:
                check(policy, terms)
            except Refused as no:
                self.note(policy, terms, {}, {"refused": no.code})
                raise

        return checking

    def granted(self, grant: Callable[..., SiteGrant]) -> Callable[..., SiteGrant]:
        """Note what is asked for and what is granted."""

        @functools.wraps(grant)
        def granting(
            policy: Policy,
            terms: Terms,
            records: int,
            batch: int,
            left: RemainingBudget,
            declared: bool = False,
        ) -> SiteGrant:
            given: Said = {"records": records, "batch": batch, "declared": declared}
            given["left"] = dict(vars(left))
            try:
                found = grant(policy, terms, records, batch, left, declared)
            except Refused as no:
                self.note(policy, terms, given, {"refused": no.code})
                raise
            said = {"participations": found.participations, "epsilon": found.epsilon}
            said |= {"alone": found.epsilon_alone, "delta": found.delta}
            self.note(policy, terms, given, said)
            return found

        return granting

    def note(self, policy: Policy, terms: Terms, given: Said, said: Said) -> None:
        """Keep a case, once."""
        sums = policy.secure
        given = {
            "policy": policy.model_dump(mode="json"),
            "secure": None if sums is None else sums.model_dump(mode="json"),
            "terms": _plain(terms),
            **given,
        }
        if self._taken is not None and self._taken[0] is terms:
            given = {**self._taken[1], **given}
        given = json.loads(json.dumps(given))
        key = json.dumps(given, sort_keys=True)
        self.cases.setdefault(key, {"id": self.test, "given": given, "said": said})

    def pytest_runtest_setup(self, item: Any) -> None:
        """Remember whose offers they are."""
        self.test = f"{Path(item.path).stem}.{item.name}"

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        self.path.write_text(json.dumps(list(self.cases.values())), encoding="utf-8")


def main() -> None:
    """Freeze what was recorded, as this package answers it when it is asked again.

    Left out is what a test asked of one function alone, past the checks before it.
    """
    recorded = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    kept, count = [], Counter[str]()
    for case in recorded:
        said = of_offer(case["given"])
        terms = said.pop("terms", case["given"]["terms"])
        if said == case["said"] and terms == case["given"]["terms"]:
            count[case["id"]] += 1
            kept.append({**case, "id": f"{case['id']}.{count[case['id']]}"})
    make.write("offers", kept)
    print(f"{len(kept)} of {len(recorded)} cases, {make.path_of('offers').stat().st_size} bytes")


def pytest_configure(config: Any) -> None:
    """Record, where a file is named."""
    if path := os.environ.get("FROZEN_OFFERS"):
        import dpscaffold.deployment.site.answer
        import dpscaffold.deployment.transports.flower.operation
        import dpscaffold.sums.site  # noqa: F401

        recorder = Recorder(Path(path))
        recorder.install()
        config.pluginmanager.register(recorder)


if __name__ == "__main__":
    main()
