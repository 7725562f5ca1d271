"""The privacy statement in plain words, as sections of a report."""

from __future__ import annotations

from dpscaffold.privacy.showing import digits_up, round_up
from dpscaffold.privacy.statement_types import Statement
from dpscaffold.report.blocks import BarChart, Block, Bullets, Section, Table, Text, section
from dpscaffold.report.human_tables import groups_table, terms_table

#: Whom a guarantee is towards, in words.
TOWARDS = {
    "server": "the server",
    "alone": "the server, if all other sites collude with it",
    "third_party": "somebody outside who is given the model",
    "participant": "a site that took part",
}


def privacy_section(said: Statement | None) -> Section:
    """What is promised, to whom, by which theorem, under which assumptions."""
    if said is None:
        return Section("Privacy", ())
    blocks: list[Block | None] = [Text(said.quote, strong=True)]
    if said.simulated:
        blocks.append(
            Text(
                "This run is a simulation: its seed is stored with it, so the noise can be drawn "
                "again by whoever holds the folder.",
                warning=True,
            )
        )
    if said.guarantee:
        blocks += _guaranteed(said)
    if said.preparation:
        steps = tuple(f"{step.sentence} ({step.protection})" for step in said.preparation)
        blocks += [Text("How the records were prepared, and how each step protects them:")]
        blocks.append(Bullets(steps))
    return section("Privacy", blocks)


def _guaranteed(said: Statement) -> list[Block | None]:
    mechanism, delta = said.mechanism, said.delta
    assert mechanism is not None and delta is not None  # a guarantee has both
    rows = []
    for view, words in TOWARDS.items():
        entry = said.towards(view)
        if entry.epsilon is None:
            continue
        by = f"`{entry.bound}`: {entry.theorem or ''}"
        rows.append((words, round_up(entry.epsilon), digits_up(delta), by))
    if said.ledger is not None:
        why = "a record of a user who took part n times has spent n·K steps"
        row = (
            "anybody, given who took part",
            round_up(said.ledger.epsilon),
            digits_up(delta),
            f"`{said.ledger.bound}`: {why}",
        )
        rows = [row, *rows] if said.quotes_ledger else [*rows, row]
    assumed = dict.fromkeys(
        text for view in TOWARDS for text in said.towards(view).assumptions or ()
    )
    return [
        Table("ε, smaller is stronger", ("towards", "ε", "δ", "by"), tuple(rows)),
        Text("Who is meant:"),
        Bullets(tuple(f"{TOWARDS.get(v, v)} {text}." for v, text in (said.views or {}).items())),
        Text(
            f"What is hidden (the neighbours): {mechanism.neighbours}. Each gradient is clipped "
            f"to {mechanism.clip} and gets Gaussian noise, {mechanism.noise_scale}, with σ_g = "
            f"{mechanism.noises()}; {mechanism.sampling}."
        ),
        *_by_user(said),
        Text("What has to be true for it to hold:"),
        Bullets(tuple(f"{text[0].upper()}{text[1:]}." for text in assumed)),
    ]


def _by_user(said: Statement) -> list[Block | None]:
    """How ε differs between users with budgets of their own: the bars count users."""
    found = said.by_user
    if found is None:
        return []
    values = sorted(found.epsilon)
    low, high = values[0], values[-1]
    step = (high - low) / 8 or 1.0
    counts: dict[str, int] = {}
    for value in values:
        place = min(7, int((value - low) / step))
        label = round_up(min(high, low + (place + 1) * step))
        counts[label] = counts.get(label, 0) + 1
    bars = tuple((label, float(users)) for label, users in counts.items())
    title = "Users by their own ε towards the server"
    return [Text(found.sentence()), BarChart(title, "ε up to", "users", bars)]


def person_section(said: Statement | None) -> Section:
    """What ε means for one person."""
    human = said.human if said else None
    if said is None or not human:
        return Section("What ε means for one person", ())
    server = human["server"]
    head, rows = terms_table(human)
    blocks: list[Block | None] = [
        Text(said.person or server.sentence()),
        Table("The best test for whether somebody's record was used", head, tuple(rows)),
    ]
    if server.groups:
        head, rows = groups_table(human)
        blocks.append(Table("Several of one person, towards the server", head, tuple(rows)))
    return section("What ε means for one person", blocks)


def outside_section(said: Statement | None) -> Section:
    """Everything that no bound covers, and what of the tuning need not be."""
    if said is None or not said.outside:
        return Section("Outside the guarantee", ())
    tuning = Text(f"Not among it: {said.tuning}") if said.tuning else None
    return section("Outside the guarantee", [Bullets(said.outside), tuning])
