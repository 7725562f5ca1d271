"""What came before a run: the run that it continues, and folders that older versions wrote.

A deployed run can go on as another one, with more sites. Its rounds are released, so the statement
of the one that goes on counts them too. The folder ``earlier`` holds a copy of its ledger, so that
no other folder is needed; the first line of the new journal names it, so it cannot be left out. If
the earlier run continued one itself, its own ``earlier`` is inside.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from dpscaffold.atomic import draft_of, put_in_place, write_text
from dpscaffold.errors import BadInput
from dpscaffold.privacy.mechanism import Stored
from dpscaffold.runs.journal import Journal, digest
from dpscaffold.runs.written import read_json

#: The folder, and the file in it that says who the users are.
EARLIER, PEOPLE = "earlier", "people.json"
#: Stands in the folder of a run that goes on as another one.
CONTINUED = "continued.json"
#: What a run's account is made of.
FILES = ("ledger.jsonl", "ledger.head")
#: Files that only versions before 0.3 wrote into a run's or a model's folder.
OLD = (
    *("versions.json", "ledger.json", "setting.json"),
    *("noised.jsonl", "personal-privacy.json", "joining.json"),
)


@dataclass(frozen=True)
class People(Stored):
    """The names of the users of the earlier run and of this one, in the order of their numbers;
    ``cap`` is the most often that any of them takes part in both together, by its own rule; 0 where
    there is no such rule."""

    before: tuple[str, ...]
    now: tuple[str, ...]
    cap: int


def keep_earlier(folder: Path, old: Path, people: People) -> None:
    """Copy the ledger of the run in ``old``; an earlier copy is replaced whole."""
    draft = draft_of(folder / EARLIER)
    for name in FILES:
        shutil.copyfile(old / name, draft / name)
    if (old / EARLIER).is_dir():
        shutil.copytree(old / EARLIER, draft / EARLIER)
    write_text(draft / PEOPLE, json.dumps(asdict(people)) + "\n")
    put_in_place(draft, folder / EARLIER)


def read_people(folder: Path) -> People:
    """Who the users of a run and of the one that it continues are."""
    path = folder / EARLIER / PEOPLE
    return People.from_json(read_json(path) or {}, str(path))


def mark_of_earlier(folder: Path) -> str | None:
    """What binds a run to the one that it continues; None where it continues none."""
    if not (folder / EARLIER).exists():
        return None
    anchor, people = Journal(folder / EARLIER / FILES[0]).anchor, read_people(folder)
    inner = mark_of_earlier(folder / EARLIER)
    return digest({"journal": asdict(anchor), "people": asdict(people), "earlier": inner})


def refuse_old(folder: Path) -> None:
    """Refuse the folder of a run or of a model that an older version wrote: it may have spent what
    this version does not see."""
    if not any((folder / name).exists() for name in OLD):
        return
    said = read_json(folder / OLD[0]) or {}
    version = said.get("dpscaffold", "of a version before 0.3")
    raise BadInput(
        "wrong-version",
        f"{folder} was written by dpscaffold {version}, whose files this one does not read; read "
        f"it with that version, and enter what it spent into a new budget file with "
        f"--already-spent EPSILON DELTA",
    )
