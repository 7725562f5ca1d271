"""A run on disk: complete or resumable at every moment, whatever kills the process.

===================  ==========================================================================
file                 holds
===================  ==========================================================================
versions.json        the software and device that made it
run.json             the identity of its data and its engine: what a configuration does not tell
data.key             the key of that identity (:mod:`~dpscaffold.runs.data_key`)
seed.json            the seed of a private run, for its owner alone
config.toml          the configuration as resolved; a folder that has it holds a run
ledger.jsonl         who took part; a line is written before a round's uploads are used
grant.json           the run's name in its budget file, if it has one
ledger.json          what the ledger is about, and a summary of it
preprocessing.json   what preparing the data spent or left unprotected
metrics.jsonl        one object per evaluated round
checkpoint.pt        the state after some round (:mod:`~dpscaffold.runs.checkpoint`)
model/               the model, once the run has ended (:mod:`~dpscaffold.models.loading`)
summary.json         final metrics, timing and how the run ended
privacy.json / .md   the privacy statement
run.log              warnings, where there were any (:mod:`~dpscaffold.runs.log`)
.lock                held by the process at work; says which
===================  ==========================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpscaffold.atomic import (
    atomic_file,
    binary_file,
    hold,
    sync_file,
    write_private,
    write_text,
    write_texts,
)
from dpscaffold.config.plan import Plan
from dpscaffold.errors import BadInput
from dpscaffold.privacy.page import Statement
from dpscaffold.privacy.seeds import SEED, Seed
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.data_key import KEY, read_key, write_key
from dpscaffold.runs.further import refuse_further
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.summary import Summary
from dpscaffold.runs.written import plain, versions

#: What a run that was killed before it had a configuration may leave behind.
BEGUN = ("versions.json", "run.json", "setting.json", KEY, SEED, ".lock")


@dataclass(frozen=True)
class Identity:
    """What makes a run this run next to its configuration: on what it really runs.

    ``data`` is the keyed digest of its records and ``covers`` what that digest looked at.
    ``home`` is the folder of its configuration, where that names files of a user's own.
    """

    data: str
    covers: str
    engine: str
    home: str | None = None


class RunFolder:
    """Reads and writes one run's files, each replaced atomically.

    From :meth:`begin` or :meth:`lock` to :meth:`release` no other process can work on the folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._metrics_hash = hashlib.sha256()

    def file(self, name: str) -> Path:
        """The path of one of the run's files."""
        return self.path / name

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun here."""
        return self.file("config.toml").exists()

    def check_free(self) -> None:
        """Refuse a folder that holds a run or anything else."""
        if self.path.exists() and not self.path.is_dir():
            raise BadInput("not-a-folder", f"--out is {self.path}, which is a file; name a folder")
        self._refuse_a_run()
        if self.path.exists() and any(not _is_left_over(path) for path in self.path.iterdir()):
            raise BadInput(
                "folder-not-empty",
                f"--out is {self.path}, which is not empty and holds no run; name a new or an "
                f"empty folder",
            )

    def begin(
        self,
        config: str,
        identity: Identity,
        setting: Mapping[str, Any],
        key: bytes | None = None,
        seed: Seed | None = None,
    ) -> None:
        """Claim the folder for a new run; refuses one that holds another run or anything else.

        ``key`` is that of the data's identity, None where the identity has none. ``seed`` is kept
        for its owner alone; a run without privacy has none to keep.
        """
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        made_by = json.dumps(versions(), indent=2) + "\n"  # starts a process: before the lock
        self.lock()
        self._refuse_a_run()  # begun by another process since
        if key is not None:
            self.file(KEY).unlink(missing_ok=True)  # of a run that was killed before it began
            write_key(self.file(KEY), key)
        if seed is not None:
            write_private(self.file(SEED), json.dumps(seed.to_json()) + "\n")
        texts = {
            "versions.json": made_by,
            "run.json": json.dumps(asdict(identity), indent=2) + "\n",
            "setting.json": json.dumps(setting, indent=2) + "\n",
            "config.toml": config,  # last: with it the run has begun
        }
        write_texts(self.path, texts)

    def kept_seed(self) -> Seed:
        """The seed that the run in this folder draws from; without it the run cannot go on."""
        saved = self.read_json(SEED)
        if saved is None:
            raise BadInput(
                "seed-missing",
                f"{self.path} holds a private run without the seed that it draws from ({SEED}), so "
                f"it cannot be resumed; restore the file, or start a new run elsewhere",
            )
        return Seed.from_json(saved, str(self.file(SEED)))

    def _refuse_a_run(self) -> None:
        if self.holds_run:
            raise BadInput(
                "run-exists",
                f"--out is {self.path}, which already holds a run; "
                "add --resume to continue it, or name another folder",
            )

    def lock(self) -> None:
        """Keep other processes out until :meth:`release`, or until this process ends."""
        descriptor = os.open(self.file(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            hold(descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise BadInput(
                "folder-in-use",
                f"--out is {self.path}, where another process{holder and f' ({holder})'} is at "
                f"work; wait until it ends, or name another folder",
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise BadInput(
                "folder-not-lockable",
                f"--out is {self.path}, which cannot be locked ({error.strerror}); name a folder "
                f"on a file system with locks",
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock = descriptor

    def release(self) -> None:
        """Let other processes in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check_same(self, config: Mapping[str, Any], longer: bool = False) -> None:
        """Refuse to resume under another configuration, naming the first difference; a ``longer``
        plan may have more rounds, and is then no plan of a public surrogate any more."""
        import tomllib

        try:
            saved = tomllib.loads(self.file("config.toml").read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadInput(
                "run-damaged",
                f"{self.file('config.toml')} is damaged ({error}); restore it or start a new run",
            ) from error
        if longer:
            saved, config = _without_rounds(saved), _without_rounds(config)
        self._refuse_difference(saved, config)

    @property
    def rate(self) -> float | None:
        """η₀ of the run in this folder; None where it holds none."""
        plan = (self.read_json("setting.json") or {}).get("plan")
        return plan.get("learning_rate") if isinstance(plan, dict) else None

    def is_outgrown(self, plan: Plan) -> bool:
        """Whether the plan gives the run in this folder more rounds than it was planned with;
        fewer are refused."""
        saved = (self.read_json("setting.json") or {}).get("plan")
        try:
            rounds = int((saved or {})["rounds"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return False  # check_setting says what is wrong
        if plan.rounds < rounds:
            raise BadInput(
                "fewer-rounds",
                f"{self.path} holds a run with plan.rounds = {rounds}, not {plan.rounds}; a run "
                f"can be given more rounds, not fewer",
            )
        return plan.rounds > rounds

    def check_setting(self, setting: Mapping[str, Any], longer: bool = False) -> None:
        """Refuse to resume under another setting: an algorithm, a plan or a budget that the
        configuration names alike and that is not the same."""
        saved = self.read_json("setting.json")
        if saved is None:
            raise BadInput(
                "run-too-old",
                f"{self.path} holds a run of an earlier version, which did not write down its "
                f"setting (setting.json), so it cannot be resumed; start a new run elsewhere",
            )
        now = json.loads(json.dumps(setting))
        if longer:
            saved, now = _without_rounds(saved), _without_rounds(now)
        self._refuse_difference(saved, now)

    def replan(self, config: str, setting: Mapping[str, Any]) -> None:
        """Keep the plan of a run that was given more rounds. The setting comes last: until it is
        there, the next to resume finds the run outgrown once more."""
        self.write_text("config.toml", config)
        self.write_text("setting.json", json.dumps(setting, indent=2) + "\n")

    def _refuse_difference(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        difference = _first_difference(saved, now)
        if difference:
            key, old, new = difference
            raise BadInput(
                "configuration-changed",
                f"{self.path} holds a run with {key} = {old!r}, not {new!r}; resume it with its "
                f"own configuration",
            )

    def data_key(self, given: Path | None = None) -> bytes:
        """The key of the data's identity; a given file must hold the same one."""
        if not self.file(KEY).exists():
            raise BadInput(
                "data-key-missing",
                f"{self.path} holds a run without the key of its data's identity ({KEY}), so it "
                f"cannot be resumed; restore the file, or start a new run elsewhere",
            )
        key = read_key(self.file(KEY))
        if given is not None and (not given.exists() or read_key(given) != key):
            raise BadInput(
                "data-key-changed",
                f"--data-key is {given}, and the run in {self.path} began with another key; leave "
                f"it out to resume",
            )
        return key

    def check_identity(self, now: Identity) -> None:
        """Refuse to resume on other data or with another engine."""
        saved = self.read_json("run.json")
        if saved is None:
            raise BadInput(
                "run-too-old",
                f"{self.path} holds a run of an earlier version, which did not write down its "
                f"data's identity (run.json), so it cannot be resumed; start a new run elsewhere",
            )
        if saved.get("data") != now.data:
            raise BadInput(
                "records-differ",
                f"{self.path} holds a run on other data; resume it on the very records it began "
                f"with",
            )
        if saved.get("engine") != now.engine:
            raise BadInput(
                "configuration-changed",
                f"{self.path} holds a run of the engine {saved.get('engine')!r}, not "
                f"{now.engine!r}; resume it with its own",
            )

    def write_text(self, name: str, text: str) -> None:
        """Replace a file whole."""
        write_text(self.path / name, text)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint; the metrics that it names are on the disk before it is."""
        if self.file("metrics.jsonl").exists():
            sync_file(self.file("metrics.jsonl"))
        named = replace(checkpoint, metrics=self._metrics_hash.hexdigest())
        with atomic_file(self.file("checkpoint.pt")) as partial, binary_file(partial) as stream:
            torch.save(named.to_dict(), stream)

    def load_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None where the run stopped before its first."""
        path = self.file("checkpoint.pt")
        if not path.exists():
            return None
        try:
            with zipfile.ZipFile(path) as parts:  # torch reads a flipped bit without a word
                damaged = parts.testzip()
            if damaged:
                raise ValueError(f"its part {damaged} is damaged")
            saved = dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:
            raise BadInput(
                "checkpoint-damaged",
                f"{path} cannot be read as a checkpoint ({type(error).__name__}); restore the "
                f"file, or start a new run elsewhere",
            ) from error
        return Checkpoint.from_dict(saved, str(path))

    def append_metrics(self, row: HistoryRow) -> None:
        """Add one evaluated round."""
        with self.file("metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(_lines([row]))
        self._metrics_hash.update(_lines([row]).encode())

    def metrics(self) -> list[HistoryRow]:
        """All evaluated rounds; a line cut short by a crash is dropped."""
        path = self.file("metrics.jsonl")
        rows = []
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.split("\n"):
            try:
                rows.append(HistoryRow.from_json(json.loads(line)))
            except ValueError:
                break
        return rows

    def check_metrics(self, round: int, digest: str | None) -> None:
        """Refuse metrics that are not those a checkpoint was written after."""
        found = hashlib.sha256(_lines(self._metrics_until(round)).encode()).hexdigest()
        if digest is not None and found != digest:
            raise BadInput(
                "run-damaged",
                f"{self.file('metrics.jsonl')} is not as this run left it: rounds up to {round} "
                f"were lost or changed; restore it or start a new run",
            )

    def _metrics_until(self, round: int) -> list[HistoryRow]:
        return [row for row in self.metrics() if row.round <= round]

    def rewind_metrics(self, round: int) -> list[HistoryRow]:
        """Keep the evaluated rounds up to ``round``: what came after is run again."""
        rows = self._metrics_until(round)
        self.write_text("metrics.jsonl", _lines(rows))
        self._metrics_hash = hashlib.sha256(_lines(rows).encode())
        return rows

    def statement(self) -> Statement | None:
        """The privacy statement, or None where the run has none yet."""
        refuse_further(self.path)
        found = self.read_json("privacy.json")
        if found is None:
            return None
        return Statement.from_json(found, str(self.file("privacy.json")))

    def write_summary(self, summary: Summary) -> None:
        """Write ``summary.json``: the run has ended."""
        self.write_text("summary.json", json.dumps(plain(summary), indent=2) + "\n")

    def summary(self) -> Summary:
        """How the run ended; ``Summary()`` where it has not."""
        try:
            return Summary.from_json(self.read_json("summary.json") or {}, "summary")
        except ValueError as error:
            raise BadInput(
                "run-damaged",
                f"{self.file('summary.json')} is not a summary that this version reads ({error}); "
                f"restore it",
            ) from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run, or None."""
        path = self.file(name)
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadInput(
                "run-damaged", f"{path} is not valid JSON ({error}); restore it or start a new run"
            ) from error
        if not isinstance(found, dict):
            raise BadInput(
                "run-damaged", f"{path} holds no table of values; restore it or start a new run"
            )
        return found


def _without_rounds(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables without what a longer plan changes."""
    plan = dict(tables.get("plan", {}))
    plan = {key: value for key, value in plan.items() if key != "rounds"}
    return {**{key: tables[key] for key in tables if key != "facts"}, "plan": plan}


def _lines(rows: list[HistoryRow]) -> str:
    return "".join(json.dumps(plain(row)) + "\n" for row in rows)


def _is_left_over(path: Path) -> bool:
    return path.name in BEGUN or (path.name.startswith(".") and ".partial" in path.name)


def _first_difference(
    saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    for key in sorted(set(saved) | set(now)):
        old, new = saved.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            inner = _first_difference(old, new, f"{prefix}{key}.")
            if inner:
                return inner
        elif old != new:
            return f"{prefix}{key}", old, new
    return None
