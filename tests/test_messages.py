"""Every refusal has a code, and the list of all messages is current, so that a change of wording is
seen in review."""

from __future__ import annotations

import ast
import pickle
import re

import pytest
from list_messages import CODED, LIST, TREE, codes, listed, messages, refusals
from refusals import PAGE, listed_codes, refuses

from dpscaffold.deployment.protocol.messages import REASONS
from dpscaffold.errors import BadInput, BadValue
from dpscaffold.privacy.errors import PrivacyError


def test_the_list_is_current() -> None:
    found = listed()
    assert found == LIST.read_text(encoding="utf-8"), "run python tests/list_messages.py"
    assert found.count("\n") > 700


def without_code(source: str) -> list[str]:
    """The refusals of a source whose first argument is neither a code nor that of another error."""
    return [
        ast.unparse(call)
        for call in refusals(source)
        if ast.unparse(call.func) in CODED and not _has_code(call)
    ]


def _has_code(call: ast.Call) -> bool:
    first = call.args[0] if call.args else ast.Constant(None)
    if found := codes(first):
        return all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in found)
    name = ast.unparse(first).rpartition(".")[2]
    return isinstance(first, ast.Starred) or name in PASSED_ON


#: What a variable with a code is called: that of another refusal, or of a table of codes.
PASSED_ON = ("code", "reason")


def test_every_refusal_has_a_code() -> None:
    paths = sorted((TREE / "src" / "dpscaffold").rglob("*.py"))
    missing = {str(path): found for path in paths if (found := without_code(path.read_text()))}
    assert not missing


@pytest.mark.parametrize(
    "source",
    [
        'raise BadInput("a sentence; give more")',
        'raise BadInput(f"{name} is {value}; give more")',
        'raise PrivacyError("Not_Kebab", "a sentence")',
        'def refusal():\n    return BadInput(sentence, "a sentence")',
    ],
)
def test_a_refusal_without_a_code_is_seen(source: str) -> None:
    assert without_code(source)


def test_codes_are_seen() -> None:
    assert not without_code('raise BadInput("unknown-column", f"there is no {name}")')
    assert not without_code('raise BadInput("not-text" if x else "not-a-list", "a sentence")')
    assert not without_code('raise BadInput(error.code, f"{path}: {error}")')


def test_every_code_has_one_meaning() -> None:
    """The page of codes is complete, and lists nothing that is not raised."""
    sources = [path.read_text() for path in (TREE / "src" / "dpscaffold").rglob("*.py")]
    calls = [call for source in sources for call in refusals(source) if call.args]
    used = {(ast.unparse(call.func), code) for call in calls for code in codes(call.args[0])}
    assert {code for name, code in used if name == "Refused"} <= set(REASONS)
    known = listed_codes()
    raised = {code for name, code in used if name in CODED and name != "Refused"}
    assert not raised - set(known), "add them to docs/errors.md"
    assert not [code for code in known if not any(f'"{code}"' in source for source in sources)]
    assert len({meaning.lower() for meaning in known.values()}) == len(known)
    answers = PAGE.read_text(encoding="utf-8").partition("## What a site answers")[2]
    assert re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", answers, re.M) == [*REASONS.items()]


def test_a_test_that_expects_a_code_can_fail() -> None:
    error = BadInput("not-a-number", "plan.rounds is 'x' and more; give a number")
    for expected in ("not-a-number", "not-a-number: plan.rounds is 'x'", "not-a-number: is … give"):
        with refuses(expected):
            raise error
    for wrong in ("out-of-range", "no-such-code", "not-a-number: plan.steps"):
        with pytest.raises(AssertionError), refuses(wrong):
            raise error
    with pytest.raises(pytest.fail.Exception), refuses("not-a-number"):
        pass


@pytest.mark.parametrize("kind", [BadInput, BadValue, PrivacyError])
def test_a_refusal_shows_its_sentence_and_keeps_its_code(kind: type[BadInput]) -> None:
    refused = pickle.loads(pickle.dumps(kind("not-a-number", "rounds is 'x'; give a number")))
    assert (type(refused), refused.code) == (kind, "not-a-number")
    assert str(refused) == "rounds is 'x'; give a number"


def test_messages_are_found_with_their_values() -> None:
    source = (
        'if x:\n    raise BadInput("out-of-range", f"plan.rounds is {plan.rounds}; "\n'
        '        "give more than 0")'
    )
    assert list(messages(source)) == [
        "out-of-range: plan.rounds is {plan.rounds}; give more than 0",
    ]
    assert list(messages("raise ValueError(reason)")) == []
