"""Keys that several tables share: how a file is written, and what its cells mean.

``[data]`` of a training run and of a site, ``[evaluate]`` and ``[schema]`` have the same words for
the same things; each is declared here once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dpscaffold.data.tables.cells import Forms, checked_spellings, refuse_two_readings
from dpscaffold.data.tables.dialect import AUTO
from dpscaffold.data.tables.missing import Rule, checked_na_strings
from dpscaffold.errors import BadValue

#: A path as text, given as either.
PathText = Annotated[str, BeforeValidator(lambda p: os.fspath(p) if isinstance(p, Path) else p)]


class _Shared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Sourced(_Shared):
    """Records of one kind of source, each of which is a class of its own."""

    source: str
    """The source of the records; a [data] table without it is the paper's synthetic data. Example:
    ``"csv"``"""


class Located(_Shared):
    """Records that lie in a file or a folder."""

    path: PathText | None
    """Where the records lie. Example: ``"records.csv"``"""


class Stored(Located, Sourced):
    """A source that lies in a file or a folder."""


class Sizes(_Shared):
    """How many records there are, as everybody may know."""

    records: int | tuple[int, ...] | dict[str, int] | None
    """The public number of training records: of a site, of every user, or of each site by name.
    Example: ``400``"""


class Shaped(_Shared):
    """Records that are no flat rows."""

    shape: tuple[int, ...] | None
    """The shape of a record. Example: ``[1, 28, 28]``"""


class Users(_Shared):
    """Among whom records lie."""

    users: int | None
    """M, the number of users. Example: ``50``"""


class Alike(Users):
    """How alike users are."""

    similarity: float | Literal["unknown"]
    """γ, the similarity of the users in per cent. Example: ``10.0``"""


class Classes(_Shared):
    """What is told apart."""

    classes: int | tuple[str, ...] | None
    """The class labels in order, or the number of classes; 0 where a number is predicted. Example:
    ``["no", "yes"]``"""


class Shape(Classes):
    """What is learnt from what: by name, or public numbers alone."""

    features: int | tuple[str, ...] | None
    """The columns to learn from, or the number of features. Example: ``["age", "stay"]``"""


class Ends(_Shared):
    """The public range of a number to predict."""

    low: float | None = Field(default=None, allow_inf_nan=False)
    """The smallest value that the number to predict can have, known without looking at the records.
    Labels are mapped from low and high to -1 and 1, and clipped outside; predictions have the
    label's own units. Value: a finite number. Example: ``0.0``"""
    high: float | None = Field(default=None, allow_inf_nan=False)
    """The largest value that the number to predict can have. Value: a finite number. Example:
    ``60.0``"""


class Gaps(_Shared):
    """Which texts mean a missing value."""

    na_values: Annotated[
        tuple[str, ...] | dict[str, tuple[str, ...]] | None, BeforeValidator(checked_na_strings)
    ] = None
    """NA strings: texts that mean a missing value, in addition to an empty cell. Give a list for
    every column, or a table of lists by column ('*' for all others). Surrounding blanks are
    ignored, and in a column of numbers '-9' also matches -9.0. The model keeps the list, so new
    rows are read in the same way; a site adds those of its own file. Value: a list of strings, or a
    table by column of such lists. Example: ``{ pressure = ["-9", "?"] }``"""


class CsvFormat(Gaps):
    """How a CSV file is written."""

    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | Literal["auto"] = ","
    """The delimiter between columns. 'auto' detects it in each file, outside the guarantee; a site
    and [evaluate] name it. Value: one character, or 'auto'. Example: ``";"``"""
    encoding: str = "utf-8"
    """The encoding of the file. 'auto' detects UTF-8, UTF-16 and Windows-1252 in each file, outside
    the guarantee; a site and [evaluate] name it. Example: ``"latin-1"``"""
    decimal: Literal[".", ",", "auto"] = "."
    """The decimal separator. 'auto' detects it in each file, outside the guarantee; a site and
    [evaluate] name it. Example: ``","``"""

    @model_validator(mode="after")
    def _plain_sign(self) -> CsvFormat:
        sign = self.delimiter
        if sign != AUTO and (not sign.isascii() or sign in '"\r\n\0'):
            raise BadValue(
                "not-one-character", f"delimiter is {sign!r}; give one plain sign, such as ';'"
            )
        return self


class Meanings(Shape, Gaps):
    """What the columns of a table are, and what their cells mean."""

    label: str | tuple[str, ...]
    """The column to predict. Example: ``"readmitted"``"""
    categories: tuple[str, ...] | dict[str, tuple[str, ...]]
    """The categorical columns, with their values. Example: ``{ sex = ["f", "m"] }``"""
    missing: Literal["refuse", "drop"] | float | dict[str, Rule]
    """What replaces a missing number. Example: ``-1.0``"""

    values: Annotated[
        dict[str, dict[str, tuple[str, ...]]] | None, BeforeValidator(checked_spellings)
    ] = None
    """Other spellings of labels and categories: a table by column that gives each value its other
    spellings. Surrounding blanks are ignored. The model keeps them, so new rows are read in the
    same way. Value: a table by column of tables of lists of strings. Example: ``{ readmitted
    = { yes = ["Yes", "ja"] } }``"""
    absent: tuple[str, ...] = ()
    """Columns that some files (or sites) may lack. Their values are missing there and are treated
    as missing says. Files of new rows may lack them, too. Example: ``["pressure"]``"""
    dates: dict[str, Forms] = Field(default_factory=dict)
    """Date columns, each with its format (strptime codes). They are read as days since 1970-01-01.
    Give a list of formats if files differ: the first that fits is used, and two that read the same
    text as different days are refused. Value: a table by column of strings, or of lists of strings.
    Example: ``{ age = ["%d.%m.%Y", "%Y-%m-%d"] }``"""

    @model_validator(mode="after")
    def _readable_dates(self) -> Meanings:
        """Every column of dates has a form, and no text is read in two ways."""
        for name, forms in self.dates.items():
            if not forms:
                raise BadValue(
                    "empty-list", f"dates.{name} lists no form; give one, such as '%Y-%m-%d'"
                )
            refuse_two_readings(name, forms)
        return self
