"""Values that files spell in several ways: "Yes", "ja" and "ys" for "yes".

Which spellings mean the same is for people to say (``data.values``): each would otherwise be a
class or category of its own. Blanks around a text do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpscaffold.data.tables.missing import BLANKS, NaStrings
from dpscaffold.errors import BadInput, nearest

#: A column, and each of its values with the other spellings of it.
Columns = tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]


@dataclass(frozen=True)
class Spellings:
    """The values of columns, each with its other spellings.

    >>> known = Spellings.given({"ready": {"yes": ["Yes", "ja"], "no": ["nein"]}})
    >>> known.of("ready"), known.of("age")
    ({'Yes': 'yes', 'ja': 'yes', 'nein': 'no'}, {})
    """

    columns: Columns = ()

    @classmethod
    def given(cls, values: Mapping[str, Mapping[str, Sequence[str]]] | None) -> Spellings:
        """Those of ``data.values``."""
        return cls(
            tuple(
                (name, tuple((value, tuple(listed)) for value, listed in table.items()))
                for name, table in (values or {}).items()
            )
        )

    def of(self, name: str) -> dict[str, str]:
        """The value of every other spelling in a column."""
        pairs = dict(self.columns).get(name, ())
        return {text: value for value, listed in pairs for text in listed}

    def among(self, names: Iterable[str]) -> Columns:
        """What is said of these columns."""
        wanted = {*names}
        return tuple(entry for entry in self.columns if entry[0] in wanted)

    def require(self, names: Iterable[str], key: str) -> None:
        """Refuse a column whose values are not texts to be told apart."""
        known = [*names]
        for name, _ in self.columns:
            if name not in known:
                raise BadInput(
                    f"{key} names '{name}'{nearest(name, known)}, which is neither a label of "
                    f"classes nor in categories ({', '.join(known) or 'none'}); list it in "
                    f"categories, or leave it out of {key}"
                )

    def require_known(self, known: Mapping[str, Sequence[str]], na: NaStrings, key: str) -> None:
        """Refuse a value that is not among those that are given for a column, a spelling that is
        one of them, and one that means missing."""
        for name, pairs in self.columns:
            given = known.get(name) or ()
            for value, listed in pairs:
                if given and value not in given:
                    raise BadInput(
                        f"{key}.{name} reads spellings as '{value}', which is not among the given "
                        f"values of the column ({', '.join(given[:8])}); name one of these"
                    )
                both = next((text for text in listed if text in given), None)
                if both is not None:
                    raise BadInput(
                        f"{key}.{name} reads '{both}' as '{value}', and '{both}' is among the "
                        f"given values of the column; take it out of one of them"
                    )
                gap = next((text for text in (value, *listed) if text in na.of(name)), None)
                if gap is not None:
                    raise BadInput(
                        f"{key}.{name} and gaps both name '{gap}'; take it out of one of them"
                    )


def toml_text(value: str) -> str:
    """A text of TOML, which takes no DEL as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """A key of TOML, in quotes where it needs them.

    >>> toml_key("ready"), toml_key("blood pressure")
    ('ready', '"blood pressure"')
    """
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_text(name)


def written(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    """The line of a configuration that reads spellings of a column as one value.

    >>> written("ready", {"yes": ["Yes", "ja"]})
    'values.ready = { yes = ["Yes", "ja"] }'
    """
    pairs = (
        f"{toml_key(value)} = [{', '.join(map(toml_text, listed))}]"
        for value, listed in groups.items()
    )
    return f"values.{toml_key(name)} = {{ {', '.join(pairs)} }}"


#: Every text is a value of its own.
NO_SPELLINGS = Spellings()


def checked_spellings(given: Any, key: str = "values") -> Any:
    """Spellings as they are given, without blanks around them; refused where one stands for two
    values, or where something is no text."""
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(table, dict) for table in given.values()):
        raise BadInput(
            f"{key} is {given!r}; give a table by column, such as "
            f"{{ ready = {{ yes = ['Yes', 'ja'] }} }}"
        )
    return {name: _checked(f"{key}.{name}", table) for name, table in given.items()}


def _checked(key: str, table: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    taken: dict[str, str] = {value.strip(BLANKS): value for value in table}
    for value, listed in table.items():
        if not isinstance(listed, list | tuple) or not all(isinstance(t, str) for t in listed):
            raise BadInput(
                f'{key}.{value} is {listed!r}; give a list of texts, as in ["Yes", "ja"]'
            )
        plain = dict.fromkeys(text.strip(BLANKS) for text in listed)
        plain.pop(value.strip(BLANKS), None)
        for text in plain:
            if text in taken:
                raise BadInput(
                    f"{key} reads '{text}' as '{value}', and it stands for '{taken[text]}' "
                    f"already; name it once"
                )
            if not text:
                raise BadInput(f"{key}.{value} holds an empty text; empty cells are missing values")
            taken[text] = value
        found[value.strip(BLANKS)] = tuple(plain)
    return found
