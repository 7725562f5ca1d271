"""The privacy account of a run in progress: who may take part, what has been spent, what may be
said.

The journal ``ledger.jsonl`` gets one line per round *before* the round's uploads are used, so a
crash can only make the ledger say too much, never too little. ``ledger.json`` is its summary, with
the description of the run, and is replaced at the start and at the end.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpscaffold.checks import number, whole
from dpscaffold.errors import BadInput
from dpscaffold.privacy import (
    Cost,
    Ledger,
    PrivacyError,
    Remark,
    Spending,
    bound_for,
    charged,
    largest_rounds,
    no_guarantee,
    statement,
)
from dpscaffold.privacy.preparation import from_sentence
from dpscaffold.report.statement import render
from dpscaffold.runfolder import RunFolder, plain
from dpscaffold.setting import Setting

View = Literal["server", "third-party", "paper-third-party"]


@dataclass(frozen=True)
class Budget:
    """The limits of a run's privacy spending; all optional.

    - ``delta``: δ, by default 1/ΣR_i.
    - ``max_participations``: the most rounds that any user takes part in.
    - ``user_epsilon``: the most ε that any user spends (given who took part). A drawn user whose
      next participation would exceed a cap declines; the draw and the divisor stay the same.
    - ``target_epsilon``: training halts before ε towards ``view`` would exceed it.

    >>> Budget(target_epsilon=1.0).view
    'server'
    """

    delta: float | None = None
    max_participations: int | None = None
    user_epsilon: float | None = None
    target_epsilon: float | None = None
    view: View = "server"

    def __post_init__(self) -> None:
        if self.delta is not None and not 0 < number("privacy.delta", self.delta) < 1:
            raise BadInput(f"privacy.delta is {self.delta}; it must lie in (0, 1)")
        if self.max_participations is not None:
            whole("privacy.max_participations", self.max_participations, 1)
        for name in ("user_epsilon", "target_epsilon"):
            value = getattr(self, name)
            if value is not None and not number(f"privacy.{name}", value) > 0:
                raise BadInput(f"privacy.{name} is {value}; it must be positive")


class Accounts:
    """Keeps the ledger of one run; without privacy it admits everyone and promises nothing."""

    def __init__(self, setting: Setting, budget: Budget) -> None:
        self.setting, self.budget = setting, budget
        self.run = setting.describe(budget.delta, budget.max_participations)
        self.folder: RunFolder | None = None
        self._replay_until = 0
        self._most_rounds = setting.plan.rounds
        self._shown: tuple[int, float | None] = (0, None)
        if self.run is None:
            if budget != Budget():
                raise BadInput(
                    "a privacy budget is given for a run without privacy; set privacy.noise or "
                    "privacy.epsilon too"
                )
            return
        self.ledger = Ledger(self.run, budget.user_epsilon)
        self.costs, self._unprotected = charged(setting.federation.preparation, self.run)
        self.spending = Spending(self.run, bound_for(self.run, "server"), self.costs)
        self.promises = no_guarantee(self.run) is None and self.run.noise > 0
        if budget.user_epsilon is not None:
            self.ledger.declines(
                0
            )  # refuses, here and not in the first round, a run without a guarantee
        if budget.target_epsilon is not None:
            if not self.promises:
                reason = no_guarantee(self.run) or "no noise is added"
                raise BadInput(
                    f"privacy.target_epsilon is set for a run that cannot meet one: {reason}"
                )
            bound = bound_for(self.run, budget.view, draw_hidden=False)
            self._most_rounds = largest_rounds(
                self.run,
                budget.target_epsilon,
                bound,
                at_most=setting.plan.rounds,
                costs=self.costs,
            )

    def attach(self, folder: RunFolder, completed: int) -> None:
        """Keep the ledger in a run folder; picks up what was spent there, at or beyond
        ``completed`` rounds."""
        self.folder = folder
        if self.run is None:
            return
        if folder.file("ledger.json").exists():
            self.ledger = read_ledger(folder.path)
            if self.ledger.run != self.run:
                raise BadInput(
                    f"the ledger in {folder.path} describes another run; resume it with its own "
                    f"configuration"
                )
        elif completed:
            raise BadInput(
                f"{folder.path} holds a private run without its ledger; restore ledger.json or "
                f"start the run anew"
            )
        if self.ledger.rounds < completed:
            raise BadInput(
                f"the ledger in {folder.path} records {self.ledger.rounds} of {completed} "
                f"completed rounds; restore ledger.jsonl or start the run anew"
            )
        # Rounds recorded but not in the checkpoint are run again. A seeded run repeats its very
        # outputs, which costs nothing; a secret one draws fresh noise, which does.
        self._write_preprocessing()
        self._replay_until = (
            self.ledger.rounds if self.setting.privacy and self.setting.privacy.secret else 0
        )
        self._write_summary()

    def refuses(self, round: int) -> str:
        """Why this round must not run, or the empty string."""
        if self.budget.target_epsilon is None or self._within_target(round):
            return ""
        return (
            f"halted after round {round - 1} of {self.setting.plan.rounds}: one more would exceed "
            f"epsilon = {self.budget.target_epsilon:g} towards the {self.budget.view}"
        )

    def _within_target(self, round: int) -> bool:
        """Whether ε stays within the target after this round, second runs of earlier ones
        counted."""
        assert self.run is not None and self.budget.target_epsilon is not None
        repeats = (*self.ledger.repeats, *([1] if round <= self._replay_until else []))
        if not repeats:
            return round <= self._most_rounds
        bound = bound_for(self.run, self.budget.view, draw_hidden=False, repeats=repeats)
        return bound.epsilon(self.run, round, self.costs, repeats) <= self.budget.target_epsilon

    def admit(self, round: int, drawn: np.ndarray) -> np.ndarray:
        """Those of the drawn users who take part; they are in the ledger when this returns."""
        if self.run is None:
            return drawn
        active = np.array(self.ledger.allowed(drawn.tolist()), dtype=np.int64)
        again = round <= self._replay_until
        if again or round > self.ledger.rounds:
            if self.folder:
                append_line(self.folder.file("ledger.jsonl"), round, active.tolist(), again)
            self.ledger.record(round, active.tolist(), again=again)
        else:
            active = np.array(self._recorded(round, drawn), dtype=np.int64)
        return active

    def _recorded(self, round: int, drawn: np.ndarray) -> list[int]:
        """Who took part when this round first ran: a repeat under a cap must admit the same
        users."""
        assert self.folder is not None
        for line in read_lines(self.folder.file("ledger.jsonl")):
            if line["round"] == round:
                return list(line["users"])
        raise BadInput(
            f"the ledger in {self.folder.path} lacks round {round}; restore ledger.jsonl or start "
            f"the run anew"
        )

    def live(self, round: int) -> dict[str, float | None]:
        """ε towards the server after this round, refreshed at evaluated rounds."""
        if self.run is None:
            return {}
        every = self.setting.plan.evaluate_every
        if self.promises and (round % every == 0 or round == self.setting.plan.rounds):
            self._shown = (round, self._spent_by(round))
        return {"epsilon_server": self._shown[1]}

    def _spent_by(self, round: int) -> float:
        assert self.run is not None
        if self.ledger.repeats:
            return self.spending.bound.epsilon(self.run, round, self.costs, self.ledger.repeats)
        return self.spending.shown(round)

    def statement(self, rounds: int) -> dict[str, Any]:
        """The privacy statement after so many rounds."""
        federation = self.setting.federation
        if self.run is None:
            return statement(None, preparation=federation.preparation)
        seeded = not (self.setting.privacy and self.setting.privacy.secret)
        return statement(
            self.run,
            ledger=self.ledger if self.ledger.rounds else None,
            preparation=(*federation.preparation, *self._unprotected),
            seed_public=seeded,
            draw_public=True,  # participants are drawn from plan.seed, which is in config.toml
            extra_costs=self.costs,
            rounds=rounds,
        )

    def write_statement(self, folder: RunFolder, said: dict[str, Any]) -> None:
        """``privacy.json``, ``privacy.md`` and the ledger's summary."""
        folder.write_text("privacy.json", json.dumps(plain(said), indent=2) + "\n")
        folder.write_text("privacy.md", render(said))
        if self.run is not None:
            self._write_summary()

    def _write_preprocessing(self) -> None:
        """What the data's preparation spent or left unprotected, so that the folder can be stated
        on its own."""
        assert self.folder is not None and self.run is not None
        steps = (*self.setting.federation.preparation, *self._unprotected)
        said = {
            "steps": [{"sentence": step.sentence, "protection": step.protection} for step in steps],
            "costs": [vars(cost) for cost in self.costs],
        }
        self.folder.write_text("preprocessing.json", json.dumps(said, indent=2) + "\n")

    def _write_summary(self) -> None:
        assert self.folder is not None
        self.folder.write_text("ledger.json", json.dumps(self.ledger.to_dict()) + "\n")


def read_preprocessing(folder: Path) -> tuple[tuple[Remark, ...], tuple[Cost, ...]]:
    """What is said of a run's data preparation, and its costs.

    Folders of earlier versions hold sentences alone; those that are not known to be harmless count
    as unprotected.
    """
    path = folder / "preprocessing.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        steps = [Remark(step["sentence"], step["protection"]) for step in said.get("steps", ())]
        if "steps" not in said:
            steps = [from_sentence(sentence) for sentence in said["sentences"]]
        return tuple(steps), tuple(Cost(**cost) for cost in said["costs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrivacyError(
            f"{path} cannot be read ({error}), so the cost of preprocessing is unknown; restore it"
        ) from error


def append_line(path: Path, round: int, users: list[int], again: bool) -> None:
    """Add one round to a journal; it is with the operating system when this returns."""
    body = {"round": round, "users": users, "again": again}
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({**body, "check": _check(body)}) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rounds of a journal. A last line cut short is a round that never ran; other damage is
    refused."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    rows = []
    for position, line in enumerate(lines):
        if not line:
            continue
        try:
            row = json.loads(line)
            body = {key: row[key] for key in ("round", "users", "again")}
            intact = row["check"] == _check(body)
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            if position == len(lines) - 1:
                break
            raise PrivacyError(
                f"{path} is damaged at line {position + 1}; restore it or start the run anew"
            )
        rows.append(body)
    return rows


def _check(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def read_ledger(folder: Path) -> Ledger:
    """The ledger of a run folder.

    The journal is the record; the summary describes the run and may never count more than the
    journal.
    """
    summary = folder / "ledger.json"
    if not summary.exists():
        raise PrivacyError(
            f"{folder} holds no ledger (ledger.json); name the folder of a private run"
        )
    try:
        saved = Ledger.from_dict(json.loads(summary.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise PrivacyError(
            f"{summary} is damaged ({error}); restore it or start the run anew"
        ) from error
    ledger = Ledger(saved.run, saved.user_budget)
    for row in read_lines(folder / "ledger.jsonl"):
        ledger.record(row["round"], row["users"], again=row["again"])
    if bool((ledger.participations < saved.participations).any()):
        raise PrivacyError(
            f"{folder / 'ledger.jsonl'} records less than ledger.json counts; restore it or start "
            f"the run anew"
        )
    return ledger
