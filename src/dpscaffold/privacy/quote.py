"""The sentence to quote of a run, with everything that makes it true.

A run with a stored seed is a simulation and says so before anything else. A run with secret noise
whose participants were drawn from a seed that somebody gave quotes what was spent given who took
part: over the draw is a promise about chance, and a known seed is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpscaffold.privacy.bound import SERVER
from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.showing import digits_up, round_up
from dpscaffold.privacy.statement_types import (
    QuotedEpsilon,
    SpentByUsers,
    Statement,
    ViewGuarantee,
)

SIMULATION = "A simulation, whose noise comes from a stored seed."
SHARED = "Two runs of one seed share their noise, and their epsilons do not add."


def with_quote(
    said: Statement, run: Mechanism, costs: Sequence[str] = (), draw_given: bool = False
) -> Statement:
    """The statement with the ε to quote, in numbers, in a sentence, and for one person.

    ``costs`` names the other mechanisms that are counted in it, and ``draw_given`` says that the
    seed of the draw was somebody's choice.
    """
    said = replace(said, quoted=_quoted(said, draw_given))
    return replace(said, person=_person(said), quote=_sentence(said, run, costs, draw_given))


def _sentence(said: Statement, run: Mechanism, costs: Sequence[str], draw_given: bool) -> str:
    """The sentence of a statement."""
    each = "Each user" if run.unit == "user" else "Each record"
    if said.simulated:
        would = f"With secret noise {each.lower()} would be protected with"
        return " ".join([SIMULATION, f"{would} {_over_the_draw(said, run, costs)}.",
                         *_replacing(said.server, run), *_own(said),
                         *_given(said, "would have spent"), SHARED])  # fmt: skip
    if draw_given and said.ledger is not None:
        first = _given_first(said, said.ledger, run, costs)
        return " ".join([first, *_replacing(said.ledger, run, "everybody"), *_own(said)])
    sentence = f"{each} is protected with {_over_the_draw(said, run, costs)}."
    if draw_given:
        sentence += (
            " That holds for a draw that nobody chose: where its seed is given, as in this plan, "
            "quote what the run's ledger says."
        )
    rest = [*_replacing(said.server, run), *_own(said), *_given(said, "spent")]
    return " ".join([sentence, *rest])


def _own(said: Statement) -> list[str]:
    """How ε differs between users, where they have budgets of their own."""
    return [] if said.by_user is None else [said.by_user.sentence()]


def _quoted(said: Statement, draw_given: bool) -> QuotedEpsilon:
    """The ε that the sentence begins with: ``towards`` whom, and by which ``bound``; and that for
    replacing one record by another."""
    known = draw_given and not said.simulated and said.ledger is not None
    first = said.ledger if known and said.ledger is not None else said.server
    return QuotedEpsilon(
        epsilon=first.epsilon,
        replace_one=first.replace_one,
        bound=first.bound,
        towards="everybody" if known else SERVER,
    )


def _person(said: Statement) -> str:
    """What the quoted ε means for one person, in the same order and with the same condition."""
    human = said.human or {}
    terms = human.get("ledger") if said.quotes_ledger else None
    sentence = (terms or human[SERVER]).sentence()
    if said.simulated:
        return f"With secret noise it would hold: {sentence[0].lower()}{sentence[1:]}"
    return sentence


def _given_first(said: Statement, spent: SpentByUsers, run: Mechanism, costs: Sequence[str]) -> str:
    """What was spent given who took part, since the draw was known in advance."""
    each = "Each user" if run.unit == "user" else "Each record"
    everybody = "everybody"
    if said.alone is not None:
        alone = round_up(said.alone.ledger)
        everybody = f"{_with_colluders(run)} ({alone} if all other sites collude with it)"
    return (
        f"{each} is protected with epsilon = {round_up(spent.epsilon)} towards {everybody}, at "
        f"delta = {digits_up(run.delta)}{_with(costs)} ({run.neighbours}; given who took part, as "
        f"the draw came from a given seed). Over a draw that nobody chose it would be "
        f"{_over_the_draw(said, run, costs)}."
    )


def _replacing(
    said: ViewGuarantee | SpentByUsers, run: Mechanism, whom: str = "the server"
) -> list[str]:
    """ε of the other relation, where the sentence is not about replacing a record."""
    if run.relation == "replace-one" or said.replace_one is None:
        return []
    return [
        f"For replacing one record by another, epsilon = {round_up(said.replace_one)} towards "
        f"{whom}."
    ]


def _over_the_draw(said: Statement, run: Mechanism, costs: Sequence[str]) -> str:
    if said.alone is not None:
        return _over_the_draw_in_sums(said, said.alone, run, costs)
    outsider = "a third party"
    if said.third_party.bound != RANDOM_PARTICIPATION.name:
        outsider += f" that took no part ({_towards_participants(said.participant)})"
    return (
        f"epsilon = {round_up(said.server.epsilon)} towards the server and "
        f"{round_up(said.third_party.epsilon)} towards {outsider}, at delta = "
        f"{digits_up(run.delta)}{_with(costs)} ({run.neighbours}; over the random draw of "
        f"participants)"
    )


def _over_the_draw_in_sums(
    said: Statement, alone: ViewGuarantee, run: Mechanism, costs: Sequence[str]
) -> str:
    return (
        f"epsilon = {round_up(said.server.epsilon)} towards {_with_colluders(run)}, and "
        f"{round_up(alone.epsilon)} if all other sites collude with it, at delta = "
        f"{digits_up(run.delta)}{_with(costs)} ({run.neighbours}; over the random draw of "
        f"participants; secure sums, where the first number assumes that nobody breaks X25519, "
        f"HKDF, ChaCha20 or Ed25519)"
    )


def _with_colluders(run: Mechanism) -> str:
    """Whom the first ε of a run with secure sums is towards."""
    k = run.secure.colluders if run.secure is not None else 0
    helped = f", together with at most {k} of the other sites" if k else ""
    return f"a server that may be hostile{helped}"


def _given(said: Statement, verb: str) -> list[str]:
    """What was spent given who took part, next to the bound over the draw."""
    if said.ledger is None:
        return []
    return [
        f"Given who took part, the most that any user {verb} is "
        f"{round_up(said.ledger.epsilon)}; the two numbers answer different questions, quote "
        f"either with its label."
    ]


def _with(costs: Sequence[str]) -> str:
    return f", together with {', '.join(costs)}" if costs else ""


def _towards_participants(said: ViewGuarantee) -> str:
    k = said.colluders
    who = "one that did" if k == 1 else f"{k} that did, together"
    return f"{round_up(said.epsilon)} towards {who}"
