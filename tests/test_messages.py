"""The list of all messages is current, so that a change of wording is seen in review."""

from __future__ import annotations

from list_messages import LIST, listed, messages


def test_the_list_is_current() -> None:
    found = listed()
    assert found == LIST.read_text(encoding="utf-8"), "run python tests/list_messages.py"
    assert found.count("\n") > 700


def test_messages_are_found_with_their_values() -> None:
    source = (
        'if x:\n    raise BadInput(f"plan.rounds is {plan.rounds}; "\n        "give more than 0")'
    )
    assert list(messages(source)) == [
        "BadInput: plan.rounds is {plan.rounds}; give more than 0",
    ]
    assert list(messages("raise ValueError(reason)")) == []
