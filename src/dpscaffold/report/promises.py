"""The privacy statement in plain words, as sections of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpscaffold.privacy.showing import digits_up, round_up
from dpscaffold.report.blocks import Block, Bullets, Section, Table, Text, section
from dpscaffold.report.human_tables import groups_table, terms_table

#: Whom a guarantee is towards, in words.
TOWARDS = {
    "server": "the server",
    "third_party": "somebody outside who is given the model",
    "participant": "a site that took part",
}


def privacy_section(said: Mapping[str, Any]) -> Section:
    """What is promised, to whom, by which theorem, under which assumptions."""
    if not said:
        return Section("Privacy", ())
    blocks: list[Block | None] = [Text(str(said.get("quote", "")), strong=True)]
    if said.get("simulated"):
        blocks.append(
            Text(
                "This run is a simulation: its seed is stored with it, so the noise can be drawn "
                "again by whoever holds the folder.",
                warning=True,
            )
        )
    if said.get("guarantee"):
        blocks += _guaranteed(said)
    if said.get("preparation"):
        steps = tuple(f"{step['sentence']} ({step['protection']})" for step in said["preparation"])
        blocks += [Text("How the records were prepared, and how each step protects them:")]
        blocks.append(Bullets(steps))
    return section("Privacy", blocks)


def _guaranteed(said: Mapping[str, Any]) -> list[Block | None]:
    mechanism = said["mechanism"]
    rows = []
    for view, words in TOWARDS.items():
        entry = said.get(view) or {}
        if entry.get("epsilon") is None:
            continue
        rows.append(
            (
                words,
                round_up(entry["epsilon"]),
                digits_up(said["delta"]),
                f"`{entry['bound']}`: {entry.get('theorem', '')}",
            )
        )
    spent = said.get("ledger") or {}
    if spent.get("epsilon") is not None:
        why = "a record of a user who took part n times has spent n·K steps"
        row = (
            "anybody, given who took part",
            round_up(spent["epsilon"]),
            digits_up(said["delta"]),
            f"`{spent['bound']}`: {why}",
        )
        rows = [row, *rows] if _quotes_ledger(said) else [*rows, row]
    assumed = dict.fromkeys(
        text for view in TOWARDS for text in (said.get(view) or {}).get("assumptions", ())
    )
    views = said.get("views") or {}
    return [
        Table("ε, smaller is stronger", ("towards", "ε", "δ", "by"), tuple(rows)),
        Text("Who is meant:"),
        Bullets(tuple(f"{TOWARDS.get(v, v)} {text}." for v, text in views.items())),
        Text(
            f"What is hidden (the neighbours): {mechanism['neighbours']}. Each gradient is clipped "
            f"to {mechanism['clip']} and gets Gaussian noise, {mechanism['noise_scale']}, with "
            f"σ_g = {mechanism['noise']:g}; {mechanism['sampling']}."
        ),
        Text("What has to be true for it to hold:"),
        Bullets(tuple(f"{text[0].upper()}{text[1:]}." for text in assumed)),
    ]


def _quotes_ledger(said: Mapping[str, Any]) -> bool:
    """Whether what was spent given the draw is quoted first, its seed being known."""
    return bool((said.get("quoted") or {}).get("towards") == "everybody")


def person_section(said: Mapping[str, Any]) -> Section:
    """What ε means for one person."""
    human = said.get("human")
    if not human:
        return Section("What ε means for one person", ())
    server = human["server"]
    head, rows = terms_table(human)
    blocks: list[Block | None] = [
        Text(str(said.get("person", server["sentence"]))),
        Table("The best test for whether somebody's record was used", head, tuple(rows)),
    ]
    if server.get("groups"):
        head, rows = groups_table(human)
        blocks.append(Table("Several of one person, towards the server", head, tuple(rows)))
    return section("What ε means for one person", blocks)


def outside_section(said: Mapping[str, Any]) -> Section:
    """Everything that no bound covers, and what of the tuning need not be."""
    if not said.get("outside"):
        return Section("Outside the guarantee", ())
    tuning = Text(f"Not among it: {said['tuning']}") if said.get("tuning") else None
    return section("Outside the guarantee", [Bullets(tuple(said["outside"])), tuning])
