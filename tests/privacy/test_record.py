"""A statement as a typed object: its JSON is its content, and nothing of a file is lost."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest
from privacy.settings import SMALL, run_of
from refusals import refuses

from dpscaffold.privacy import Cost, Ledger, Remark, Statement, statement
from dpscaffold.privacy.adding import statement_of_parts
from dpscaffold.privacy.record import JsonRecord, optional


def ledger_of(rounds: int) -> Ledger:
    ledger = Ledger(run_of(SMALL))
    for round in range(1, rounds + 1):
        ledger.record(round, [round % 10, (round + 3) % 10])
    return ledger


def statements() -> dict[str, Statement]:
    """One statement of each kind."""
    run, steps = run_of(SMALL), [Remark("A mean.", "unprotected")]
    costs = [Cost("mean", noise=20.0), Cost("vote", epsilon=0.1, delta=1e-9)]
    return {
        "not private": statement(None, preparation=steps),
        "no noise": statement(replace(run, noise=0.0)),
        "plan": statement(run, preparation=steps, planned=["plan.rounds"]),
        "run": statement(run, ledger=ledger_of(3), seed_public=True, extra_costs=costs),
        "parts": statement_of_parts([ledger_of(3), ledger_of(2)], draw_given=True),
        "users": statement(replace(run, unit="user"), ledger=ledger_of(2)),
    }


@pytest.mark.parametrize("kind", statements())
def test_what_is_written_is_read_back(kind: str) -> None:
    said = statements()[kind]
    written = json.dumps(said.to_json(), allow_nan=False)
    read = Statement.from_json(json.loads(written))
    assert json.dumps(read.to_json()) == written
    assert read == said and read.run == said.run and read.server.epsilon == said.server.epsilon
    assert not read.unknown


def test_attributes_and_keys_agree() -> None:
    """``statement["server"]["epsilon"]`` is what notebooks and papers have read."""
    said = statements()["run"]
    assert said["server"]["epsilon"] == said.server.epsilon > 0
    assert said["ledger"]["participations"] == said.ledger.participations
    assert said["human"]["server"]["sentence"] == said.human["server"].sentence()
    assert dict(said) == said.to_json() and "journal" not in said and said.get("journal") is None
    with pytest.raises(KeyError):
        said["epsilon"]
    with pytest.raises(AttributeError):
        said.quote = "Everything is private."


def test_unknown_keys_are_kept() -> None:
    """A later version may count more: what it wrote survives being read and written."""
    content = statements()["plan"].to_json()
    content["surcharge"] = {"epsilon": 3.0}
    content["server"]["surcharge"] = 3.0
    read = Statement.from_json(content)
    assert read.to_json() == content and replace(read, rounds=1)["surcharge"] == {"epsilon": 3.0}


@pytest.mark.parametrize(
    "place, value, message",
    [
        (("server", "epsilon"), "small", "wrong-type: server.epsilon is 'small'"),
        (("server", "epsilon"), True, "wrong-type: server.epsilon"),
        (("guarantee",), 1, "wrong-type: guarantee is 1"),
        (("bounds", 0, "views"), "server", "wrong-type: views is 'server'"),
        (("outside",), None, "wrong-type: outside is None"),
        (("mechanism",), [], "wrong-type: mechanism is []"),
        (("run", "rounds"), -1, "out-of-range: rounds=-1"),
        (("run", "surcharge"), 1, "run-damaged"),
    ],
)
def test_a_value_of_another_type_is_refused(place: Any, value: Any, message: str) -> None:
    content = statements()["plan"].to_json()
    *path, last = place
    inner: Any = content
    for key in path:
        inner = inner[key]
    inner[last] = value
    with refuses(message):
        Statement.from_json(content)


@pytest.mark.parametrize("content", [[], "x", None, {}, {"quote": "Everything is private."}])
def test_what_is_no_statement_is_refused(content: Any) -> None:
    with refuses("missing-key|wrong-type: Statement"):
        Statement.from_json(content)


@pytest.mark.parametrize("seed_public", [False, True])
def test_a_statement_must_say_whether_it_is_a_simulation(seed_public: bool) -> None:
    """Without the key, a simulation could pass as a promise, or a real run could show metrics of
    its records as a simulation may."""
    content = statement(run_of(SMALL), seed_public=seed_public).to_json()
    assert Statement.from_json(content).simulated is seed_public
    del content["simulated"]
    with refuses("missing-key: simulated"):
        Statement.from_json(content)


def test_every_key_is_documented() -> None:
    for one in fields(Statement):
        assert one.name == "unknown" or f"``{one.name}``" in (Statement.__doc__ or ""), one.name


@dataclass(frozen=True, eq=False)
class Sample(JsonRecord):
    """Fields of the kinds that statements do not have."""

    kind: Literal["a", "b"]
    pair: tuple[int, float] | None = optional()


def test_literals_pairs_and_missing_keys() -> None:
    assert Sample.from_json({"kind": "a", "pair": [1, 2]}).pair == (1, 2)
    for content, message in (
        ({"kind": "c"}, "wrong-type: kind is 'c' … 'a' … 'b'"),
        ({"kind": "a", "pair": [1]}, "wrong-type: of 2"),
        ({"pair": [1, 2.0]}, "missing-key"),
    ):
        with refuses(message):
            Sample.from_json(content)
