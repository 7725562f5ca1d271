"""A run on disk: complete or resumable at every moment, whatever kills the process.

===============  ===========================================================================
file             holds
===============  ===========================================================================
config.toml      the configuration as resolved, and under ``[run]`` what else makes this run
                 this run; a folder that has it holds a run
ledger.jsonl     who took part, and what each round spent; written before uploads are used
ledger.head      the hash of the ledger's last line
metrics.jsonl    one object per evaluated round, and in the last line how the run ended
checkpoint.pt    the state after some round (:mod:`~dpscaffold.runs.checkpoint`)
model/           the model and its privacy statement, once the run has ended
secret.json      the seed and the key of the data's identity, for the owner alone
.lock            held by the process at work; says which
===============  ===========================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpscaffold.atomic import atomic_file, binary_file, hold, sync_file, write_text
from dpscaffold.errors import BadInput
from dpscaffold.privacy.page import Statement
from dpscaffold.privacy.seeds import SECRET
from dpscaffold.runs.checkpoint import Checkpoint
from dpscaffold.runs.earlier import refuse_old
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.ledger import HEAD, JOURNAL, WITHIN, read_account, read_statement
from dpscaffold.runs.secret import Secret, read_secret
from dpscaffold.runs.summary import Summary
from dpscaffold.runs.written import plain, read_json, to_toml, versions

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.pt"
#: What a resumed run may differ in.
NOT_COMPARED = ("facts.", "run.versions.", "run.covers", "run.home")
#: What a run that was killed before it had a configuration may leave behind.
BEGUN = (SECRET, ".lock")


@dataclass(frozen=True)
class Identity:
    """What makes a run this run next to its configuration: on what it really runs.

    Attributes:
        setting: The run in plain values: its algorithm with all numbers, its plan and its limits.
        engine: What takes its rounds.
        data: The keyed digest of its records.
        covers: What that digest looked at.
        home: The folder of its configuration, where that names files of a user's own.
    """

    setting: Mapping[str, Any]
    engine: str
    data: str
    covers: str
    home: str | None = None


class RunFolder:
    """Reads and writes one run's files, each replaced atomically.

    From :meth:`begin` or :meth:`lock` to :meth:`release` no other process can work on the folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def file(self, name: str) -> Path:
        """The path of one of the run's files."""
        return self.path / name

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun here; one of an older version is refused."""
        refuse_old(self.path)
        return self.file(CONFIG).exists()

    def check_free(self) -> None:
        """Refuse a folder that holds a run or anything else."""
        if self.path.exists() and not self.path.is_dir():
            raise BadInput("not-a-folder", f"--out is {self.path}, which is a file; name a folder")
        if self.holds_run:
            raise BadInput(
                "run-exists",
                f"--out is {self.path}, which already holds a run; "
                "add --resume to continue it, or name another folder",
            )
        if self.path.exists() and any(not _is_left_over(path) for path in self.path.iterdir()):
            raise BadInput(
                "folder-not-empty",
                f"--out is {self.path}, which is not empty and holds no run; name a new or an "
                f"empty folder",
            )

    def begin(self, config: str, identity: Identity, secret: Secret | None = None) -> None:
        """Claim the folder for a new run; refuses one that holds another run or anything else."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = _run_text(config, identity)  # starts a process: before the lock
        self.lock()
        self.check_free()  # another process may have begun a run
        if secret is not None:
            secret.write(self.path)
        self.write_text(CONFIG, text)  # last: with it the run has begun

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

    # --- what run this is

    def tables(self) -> dict[str, Any]:
        """The configuration, with the table ``run``."""
        path = self.file(CONFIG)
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
            dict(found.get("run", {}).get("setting", {}).get("plan", {}))
        except (ValueError, TypeError, AttributeError) as error:
            raise BadInput(
                "run-damaged", f"{path} is damaged ({error}); restore it or start a new run"
            ) from error
        return found

    @property
    def described(self) -> Mapping[str, Any]:
        """The table ``run``; empty where there is none."""
        return dict(self.tables().get("run", {}) if self.file(CONFIG).exists() else {})

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan of the run in this folder, with the step size that was chosen for it."""
        return dict(self.described.get("setting", {}).get("plan", {}))

    def replan(self, config: str, identity: Identity) -> None:
        """Keep the plan of a run that was given more rounds."""
        self.write_text(CONFIG, _run_text(config, identity))

    def check_same(self, now: Identity, config: Mapping[str, Any] | None = None) -> None:
        """Refuse to resume another run than the one in this folder, naming the first difference. A
        run with a ``config``, which is compared too, may have more rounds than it was planned
        with; one of sites may not."""
        saved = {"run": self.described} if config is None else self.tables()
        asked = tomllib.loads(to_toml({**(config or {}), "run": plain(vars(now))}))
        old, new = dict(_values(saved)), dict(_values(asked))
        for key in sorted({*old, *new}):
            before, after = old.get(key), new.get(key)
            if before == after or key.startswith(NOT_COMPARED):
                continue
            name = key.removeprefix("run.").removeprefix("setting.")
            if name == "plan.rounds" and config is not None and before and after:
                if after < before:
                    raise BadInput(
                        "fewer-rounds",
                        f"{self.path} holds a run with plan.rounds = {before}, not {after}; a run "
                        f"can be given more rounds, not fewer",
                    )
            elif key == "run.data":
                raise BadInput(
                    "records-differ",
                    f"{self.path} holds a run on other data; resume it on the very records it "
                    f"began with",
                )
            else:
                raise BadInput(
                    "configuration-changed",
                    f"{self.path} holds a run with {name} = {before!r}, not {after!r}; resume it "
                    f"with its own configuration",
                )

    def secret(self, private: bool) -> Secret:
        """The seed and the key of the run in this folder, without which it cannot go on."""
        found = read_secret(self.path)
        if found is None or (private and found.seed is None):
            raise BadInput(
                "seed-missing",
                f"{self.path} holds a run without the seed that it draws from and the key of its "
                f"data ({SECRET}), so it cannot be resumed; restore the file, or start a new run "
                f"elsewhere",
            )
        return found

    # --- what a run writes

    def write_text(self, name: str, text: str) -> None:
        """Replace a file whole."""
        write_text(self.path / name, text)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint; the metrics that it names are on the disk before it is."""
        metrics = self.file(METRICS)
        metrics.touch()
        sync_file(metrics)
        named = replace(checkpoint, metrics=hashlib.sha256(metrics.read_bytes()).hexdigest())
        with atomic_file(self.file(CHECKPOINT)) as partial, binary_file(partial) as stream:
            torch.save(named.to_dict(), stream)

    def load_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None where the run stopped before its first."""
        path = self.file(CHECKPOINT)
        if not path.exists():
            return None
        try:
            with zipfile.ZipFile(path) as parts:  # torch reads a flipped bit without a word
                damaged = parts.testzip()
            if damaged:
                raise ValueError(f"its part {damaged} is damaged")
            saved = torch.load(path, map_location="cpu", weights_only=True)
            return Checkpoint.from_dict(saved, str(path))
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(
                "checkpoint-damaged",
                f"{path} cannot be read as a checkpoint ({type(error).__name__}); restore the "
                f"file, or start a new run elsewhere",
            ) from error

    def append_metrics(self, row: HistoryRow) -> None:
        """Add one evaluated round."""
        with self.file(METRICS).open("a", encoding="utf-8") as stream:
            stream.write(_line(row))

    def write_summary(self, summary: Summary) -> None:
        """The last line of the metrics: the run has ended."""
        lines = "".join(map(_line, self.metrics()))
        self.write_text(METRICS, lines + _line(summary.to_json()))

    def check_metrics(self, round: int, digest: str | None) -> None:
        """Refuse metrics that are not those a checkpoint was written after."""
        found = hashlib.sha256(self._lines_until(round).encode()).hexdigest()
        if digest is not None and found != digest:
            raise BadInput(
                "run-damaged",
                f"{self.file(METRICS)} is not as this run left it: rounds up to {round} were lost "
                f"or changed; restore it or start a new run",
            )

    def rewind_metrics(self, round: int) -> list[HistoryRow]:
        """Keep the evaluated rounds up to ``round``: what came after is run again."""
        self.write_text(METRICS, self._lines_until(round))
        return self.metrics()

    def _lines_until(self, round: int) -> str:
        return "".join(_line(row) for row in self.metrics() if row.round <= round)

    # --- what anyone reads

    def metrics(self) -> list[HistoryRow]:
        """All evaluated rounds, up to a line that is none."""
        rows = []
        with suppress(BadInput):
            for values in self._metric_lines():
                rows.append(HistoryRow.from_json(values))
        return rows

    def summary(self) -> Summary:
        """How the run ended; ``Summary()`` where it has not."""
        last = (self._metric_lines() or [{}])[-1]
        return Summary.from_json(last if "ended" in last else {}, str(self.file(METRICS)))

    def _metric_lines(self) -> list[dict[str, Any]]:
        """The lines of the metrics, up to one that was cut short by a crash."""
        path, found = self.file(METRICS), []
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.splitlines():
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                break
        return found

    def statement(self) -> Statement | None:
        """The privacy statement; None where a run without privacy has not ended."""
        if self.file(JOURNAL).exists() or self.file(HEAD).exists():
            return read_account(self.path).statement()
        return read_statement(self.file(WITHIN))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run, or None."""
        return read_json(self.file(name))


def _run_text(config: str, identity: Identity) -> str:
    table = {**vars(identity), "versions": versions()}
    return f"{config}\n{to_toml({'run': plain(table)})}"


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(plain(values)) + "\n"


def _is_left_over(path: Path) -> bool:
    return path.name in BEGUN or (path.name.startswith(".") and ".partial" in path.name)


def _values(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of tables within tables, by their path."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
