"""What a run folder keeps of the run that it continues: its ledger, and who its users were.

A deployed run can go on as another one, with more sites. Its rounds are released, so the statement
of the one that goes on counts them too. The folder ``earlier`` holds a copy of what that needs, so
that no other folder does; the first line of the new journal names it, so it cannot be left out. If
the earlier run continued one itself, its own ``earlier`` is inside.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from dpscaffold.atomic import draft_of, put_in_place, write_text
from dpscaffold.errors import BadInput
from dpscaffold.runs.journal import Journal, digest

#: The folder, and the file in it that says who the users are.
EARLIER, PEOPLE = "earlier", "people.json"
#: Stands in the folder of a run that goes on as another one.
CONTINUED = "continued.json"
#: What a statement is made of, besides the journal.
FILES = ("ledger.jsonl", "ledger.json", "preprocessing.json", "config.toml")


@dataclass(frozen=True)
class People:
    """The names of the users of the earlier run and of this one, in the order of their numbers;
    ``cap`` is the most often that any of them takes part in both together, by its own rule; 0 where
    there is no such rule."""

    before: tuple[str, ...]
    now: tuple[str, ...]
    cap: int


def keep_earlier(folder: Path, old: Path, people: People) -> None:
    """Copy what a statement needs of the run in ``old``; an earlier copy is replaced whole."""
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
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return People(tuple(found["before"]), tuple(found["now"]), int(found["cap"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput("run-damaged", f"{path} cannot be read ({error}); restore it") from error


def mark_of_earlier(folder: Path) -> str | None:
    """What binds a run to the one that it continues; None where it continues none."""
    if not (folder / EARLIER).exists():
        return None
    anchor, people = Journal(folder / EARLIER / FILES[0]).anchor, read_people(folder)
    inner = mark_of_earlier(folder / EARLIER)
    return digest({"journal": asdict(anchor), "people": asdict(people), "earlier": inner})
