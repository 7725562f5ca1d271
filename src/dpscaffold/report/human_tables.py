"""A statement's human terms, as tables for the page and the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from dpscaffold.privacy.showing import digits_up, percent, round_up
from dpscaffold.privacy.statement_types import HumanTerms

#: How the rows are called; ``ledger`` is what was spent given who took part.
LABELS = {
    "server": "server",
    "alone": "server and all others",
    "third_party": "third party",
    "ledger": "given who took part",
}

Rows = list[tuple[str, ...]]


def terms_table(human: Mapping[str, HumanTerms]) -> tuple[tuple[str, ...], Rows]:
    """Head and rows: one row per view, the best membership test and μ, all rounded up."""
    first = next(iter(human.values()))
    head = ("towards", "right at even odds", *_rates(first), "μ (approximate)")
    rows = [
        (
            LABELS.get(view, view.replace("_", " ")),
            percent(terms.accuracy),
            *(percent(t.rate) for t in terms.true_positives),
            round_up(terms.mu),
        )
        for view, terms in human.items()
    ]
    return head, rows


def groups_table(
    human: Mapping[str, HumanTerms], view: str = "server"
) -> tuple[tuple[str, ...], Rows]:
    """Head and rows: k records of one person (or k users), in one view."""
    terms = human[view]
    head = (
        f"{terms.protects}s together",
        "right at even odds",
        *_rates(terms),
        f"epsilon at delta = {digits_up(terms.delta)}",
    )
    rows = [
        (
            str(group.size),
            percent(group.accuracy),
            *(percent(t.rate) for t in group.true_positives),
            round_up(group.epsilon) if group.epsilon is not None else "none proved",
        )
        for group in terms.groups
    ]
    return head, rows


def _rates(terms: HumanTerms) -> list[str]:
    return [f"found at {t.false_positives * 100:g} % FPR" for t in terms.true_positives]
