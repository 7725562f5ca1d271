"""The sentence to quote of a run, with everything that makes it true.

A run with a stored seed is a simulation and says so before anything else. A run with secret noise
whose participants were drawn from a seed that somebody gave quotes what was spent given who took
part: over the draw is a promise about chance, and a known seed is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpscaffold.privacy.bound import PARTICIPANT, SERVER, THIRD_PARTY
from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.showing import digits_up, round_up

SIMULATION = "A simulation, whose noise comes from a stored seed."
SHARED = "Two runs of one seed share their noise, and their epsilons do not add."


def quote(
    said: Mapping[str, Any], run: Mechanism, costs: Sequence[str] = (), draw_given: bool = False
) -> str:
    """The sentence of a statement; ``costs`` names the other mechanisms that are counted in it."""
    each = "Each user" if run.unit == "user" else "Each record"
    if said["simulated"]:
        would = f"With secret noise {each.lower()} would be protected with"
        return " ".join([SIMULATION, f"{would} {_over_the_draw(said, run, costs)}.",
                         *_replacing(said[SERVER], run), *_given(said, "would have spent"),
                         SHARED])  # fmt: skip
    if draw_given and "ledger" in said:
        first = _given_first(said, run, costs, each)
        return " ".join([first, *_replacing(said["ledger"], run, "everybody")])
    sentence = f"{each} is protected with {_over_the_draw(said, run, costs)}."
    if draw_given:
        sentence += (
            " That holds for a draw that nobody chose: where its seed is given, as in this plan, "
            "quote what the run's ledger says."
        )
    return " ".join([sentence, *_replacing(said[SERVER], run), *_given(said, "spent")])


def quoted(said: Mapping[str, Any], draw_given: bool) -> dict[str, Any]:
    """The ε that the sentence begins with: ``towards`` whom, and by which ``bound``; and that for
    replacing one record by another."""
    if draw_given and not said["simulated"] and "ledger" in said:
        spent = said["ledger"]
        return {**_numbers(spent), "towards": "everybody"}
    return {**_numbers(said[SERVER]), "towards": SERVER}


def _numbers(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: said[name] for name in ("epsilon", "replace_one", "bound")}


def for_a_person(said: Mapping[str, Any]) -> str:
    """What the quoted ε means for one person, in the same order and with the same condition."""
    human = said["human"]
    terms = human.get("ledger") if said["quoted"]["towards"] != SERVER else None
    sentence = str((terms or human[SERVER])["sentence"])
    if said["simulated"]:
        return f"With secret noise it would hold: {sentence[0].lower()}{sentence[1:]}"
    return sentence


def _given_first(said: Mapping[str, Any], run: Mechanism, costs: Sequence[str], each: str) -> str:
    """What was spent given who took part, since the draw was known in advance."""
    return (
        f"{each} is protected with epsilon = {round_up(said['ledger']['epsilon'])} towards "
        f"everybody, at delta = {digits_up(run.delta)}{_with(costs)} ({run.neighbours}; given who "
        f"took part, as the draw came from a given seed). Over a draw that nobody chose it would "
        f"be {_over_the_draw(said, run, costs)}."
    )


def _replacing(said: Mapping[str, Any], run: Mechanism, whom: str = "the server") -> list[str]:
    """ε of the other relation, where the sentence is not about replacing a record."""
    if run.relation == "replace-one" or said["replace_one"] is None:
        return []
    return [
        f"For replacing one record by another, epsilon = {round_up(said['replace_one'])} towards "
        f"{whom}."
    ]


def _over_the_draw(said: Mapping[str, Any], run: Mechanism, costs: Sequence[str]) -> str:
    outsider = "a third party"
    if said[THIRD_PARTY]["bound"] != RANDOM_PARTICIPATION.name:
        outsider += f" that took no part ({_towards_participants(said[PARTICIPANT])})"
    return (
        f"epsilon = {round_up(said[SERVER]['epsilon'])} towards the server and "
        f"{round_up(said[THIRD_PARTY]['epsilon'])} towards {outsider}, at delta = "
        f"{digits_up(run.delta)}{_with(costs)} ({run.neighbours}; over the random draw of "
        f"participants)"
    )


def _given(said: Mapping[str, Any], verb: str) -> list[str]:
    """What was spent given who took part, beside the bound over the draw."""
    if "ledger" not in said:
        return []
    return [
        f"Given who took part, the most that any user {verb} is "
        f"{round_up(said['ledger']['epsilon'])}; the two numbers answer different questions, quote "
        f"either with its label."
    ]


def _with(costs: Sequence[str]) -> str:
    return f", together with {', '.join(costs)}" if costs else ""


def _towards_participants(said: Mapping[str, Any]) -> str:
    k = said["colluders"]
    who = "one that did" if k == 1 else f"{k} that did, together"
    return f"{round_up(said['epsilon'])} towards {who}"
