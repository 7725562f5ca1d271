"""The privacy statement on paper: one page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from dpscaffold.privacy.showing import digits_up, round_up
from dpscaffold.privacy.statement_types import (
    EpsilonByUser,
    MechanismSummary,
    SpentByUsers,
    Statement,
)
from dpscaffold.report.human_tables import groups_table, terms_table

#: Users with budgets of their own are listed one by one up to this many.
MOST_USERS = 50


def render(said: Statement, title: str = "Privacy statement", names: Sequence[str] = ()) -> str:
    """One page: what to quote, the mechanism, the views, ε by bound, what is outside, the
    references. ``names`` are those of all users, for the page of a run; a model, which may be
    published, does not name them.

    >>> from dpscaffold.privacy import statement
    >>> print(render(statement(None)).splitlines()[2])
    **No guarantee: the run is not private (no clipping, no noise).**
    """
    title += " of a simulation" if said.simulated else ""
    parts = [f"# {title}", f"**{said.quote}**"]
    if said.mechanism:
        parts += ["## Mechanism", _mechanism(said, said.mechanism)]
        parts += [
            "## Adversaries",
            "\n".join(f"- `{name}`: {text}." for name, text in (said.views or {}).items()),
        ]
    if said.bounds:
        parts += ["## Epsilon by bound", _bounds(said)]
    if said.epsilon_by_delta:
        parts += ["## Epsilon by delta", _by_delta(said)]
    if said.human:
        parts += ["## In human terms", _human(said)]
    if said.by_user:
        parts += ["## Epsilon of each user", _by_user(said.by_user, names)]
    if said.ledger:
        parts += ["## Ledger", _ledger(said.ledger)]
    if said.journal:
        parts.append(f"Journal of {said.journal.lines} lines, head `{said.journal.head}`.")
    if said.extra_costs:
        parts += ["## Other mechanisms on the same records", _costs(said)]
    if said.preprocessing:
        parts += [
            "## Preprocessing",
            "\n".join(f"- {sentence}" for sentence in said.preprocessing),
        ]
    if said.tuning:
        parts += ["## Tuning", said.tuning[0].upper() + said.tuning[1:]]
    parts += [
        "## Outside the guarantee",
        "\n".join(f"- {sentence}" for sentence in said.outside),
    ]
    if said.bounds:
        parts += ["## Why each bound holds", _reasons(said)]
    return "\n\n".join(parts) + "\n"


def _mechanism(said: Statement, m: MechanismSummary) -> str:
    rate = m.rate
    rates = ""  # with a user as unit, nothing is said of sizes
    if rate is not None:
        least = "" if rate.min == rate.max else f"{rate.min:.4g} to "
        rates = f", rate {least}{rate.max:.4g}"
    rows = [
        ("unit", m.unit),
        ("neighbours", m.neighbours),
        *_replaced(said, m),
        ("sampling", f"{m.sampling}{rates}"),
        (
            "clip C",
            "median of the batch's norms (private)" if isinstance(m.clip, str) else f"{m.clip:g}",
        ),
        ("noise σ_g", f"{m.noises()} ({m.noise_scale})"),
        ("rounds × local steps", f"{said.rounds} × {m.local_steps}"),
        ("participants", f"{m.participants} of {m.users} users a round, drawn uniformly"),
        ("delta", digits_up(said.delta or 0.0, 4)),
    ]
    if m.max_participations is not None:
        rows.append(("cap", f"at most {m.max_participations} participations a user"))
    if m.may_decline is not None:
        rows.append(("a drawn user may decline", m.may_decline))
    return _table(("", ""), rows)


def _replaced(said: Statement, m: MechanismSummary) -> list[tuple[str, str]]:
    """ε for replacing a record, where the page's ε is for another relation."""
    found = [(view, said.towards(view).replace_one) for view in said.views or ()]
    if m.relation == "replace-one" or not all(e for _, e in found):
        return []
    shown = ", ".join(f"{round_up(epsilon)} ({view})" for view, epsilon in found)
    return [("epsilon for replacing one record by another", f"{shown}: a group of two")]


def _bounds(said: Statement) -> str:
    quoted = {view: said.towards(view).bound for view in said.views or ()}
    rows = []
    for row in said.bounds:
        marks = [view for view, name in quoted.items() if name == row.name]
        value = round_up(row.epsilon) if row.epsilon is not None else "does not apply"
        rows.append(
            (
                f"`{row.name}`",
                ", ".join(row.views),
                value,
                "quote: " + ", ".join(marks) if marks else "",
            )
        )
    return _table(("bound", "holds against", "epsilon", ""), rows)


def _human(said: Statement) -> str:
    """The best membership test by view, and groups of records of one person."""
    human = said.human or {}
    server = human["server"]
    low = server.mu_range[0]
    parts = [said.person or server.sentence(), _table(*terms_table(human))]
    if server.groups:
        parts += ["Several of one person, towards the server:", _table(*groups_table(human))]
    parts.append(
        f"Bounds on every test, from the run's loss distribution (trade-off function of Dong, "
        f"Roth, Su 2022), rounded up. μ is approximate: the smallest over false-positive rates "
        f"from {low:.3g} to 1 − {low:.3g}."
    )
    return "\n\n".join(parts)


def _by_delta(said: Statement) -> str:
    """One row per δ, from the run's own down."""
    found = said.epsilon_by_delta or ()
    views = list(found[0].by_view)
    rows = [(digits_up(row.delta), *(round_up(row.by_view[v]) for v in views)) for row in found]
    titles = {"ledger": "given who took part"}
    return _table(("delta", *(titles.get(v, v.replace("_", " ")) for v in views)), rows)


def _by_user(found: EpsilonByUser, names: Sequence[str]) -> str:
    """The distribution, and every user where they are few; by their names, or their numbers."""
    spread, users = found.epsilon_over_users, range(len(found.epsilon))
    heads = ("least", "quarter", "median", "three quarters", "most")
    values = (spread.min, spread.quarter, spread.median, spread.three_quarters, spread.max)
    parts = [found.sentence(), _table(heads, [tuple(map(round_up, values))])]
    named = len(names) == len(users)

    def called(user: int) -> str:
        return " ".join(names[user].split()).replace("|", "\\|") if named else str(user)

    if len(users) <= MOST_USERS:
        each = zip(users, found.epsilon, found.noise, strict=True)
        rows = [(called(user), round_up(e), f"{noise:g}") for user, e, noise in each]
        parts.append(_table(("user", "epsilon", "noise σ_i"), rows))
    else:
        low, high = (called(pick(users, key=found.epsilon.__getitem__)) for pick in (min, max))
        parts.append(f"The least is that of user {low}, the most that of {high}.")
    return "\n\n".join(parts)


def _ledger(ledger: SpentByUsers) -> str:
    e, counts = ledger.epsilon_over_users, ledger.participations
    return (
        f"Given who took part, the largest epsilon over users is "
        f"**{round_up(ledger.epsilon)}**; the median user spent {round_up(e.median)}, the least "
        f"{round_up(e.min)}. Participations per user: {min(counts)} to {max(counts)}."
    )


def _costs(said: Statement) -> str:
    lines = []
    for cost in said.extra_costs or ():
        price = (
            f"Gaussian, multiplier {cost.noise:g}"
            if cost.noise is not None
            else (f"epsilon {round_up(cost.epsilon)}, delta {digits_up(cost.delta)}")
        )
        lines.append(f"- {cost.name}: {price}")
    how = said.server.composition
    if how:
        alone = round_up(said.server.training_alone)
        lines.append(
            f"\nIncluded in the quoted numbers ({how}); training alone: {alone} towards the server."
        )
    return "\n".join(lines)


def _reasons(said: Statement) -> str:
    lines = []
    for row in said.bounds:
        if row.applies:
            lines.append(f"- `{row.name}`: {row.explanation} *{row.reference}.*")
        else:
            lines.append(f"- `{row.name}` does not apply: {row.reason}.")
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
