"""Releases made of the records of a run after it, which nothing adds to its ε.

Version 0.2 wrote some into run folders and folders of models. Whoever states an ε, adds up or fits
further refuses such a folder: read without them, it would seem to have spent less than it has.
"""

from __future__ import annotations

from pathlib import Path

from dpscaffold.errors import BadInput

#: The files of such releases, and what they hold.
FURTHER = {
    "noised.jsonl": "noised personal models",
    "personal-privacy.json": "noised personal models",
    "joining.json": "noised comparisons of models",
}


def refuse_further(folder: Path) -> None:
    """Refuse a folder that holds further releases; one inside a run folder belongs to that run."""
    places = (folder, folder.parent) if folder.name == "model" else (folder,)
    for place in places:
        for name, what in FURTHER.items():
            if (place / name).exists():
                raise BadInput(
                    "wrong-version",
                    f"{place / name} lists {what} that were released after the run, and this "
                    f"version cannot add their epsilon to the run's; use the version that wrote "
                    f"the folder",
                )
