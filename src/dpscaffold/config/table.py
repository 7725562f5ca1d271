"""A table of a configuration, as all of them are."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from dpscaffold.data.sentences import mistake_of
from dpscaffold.errors import BadInput


class ConfigTable(BaseModel):
    """A table of the configuration: frozen. Unknown keys are errors, and so is a value of another
    type: ``true`` is no 1, and ``"5"`` no number."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        """A file has lists, and strictly no list is a tuple."""
        return _with_tuples(given)

    def changed(self, **values: Any) -> Self:
        """The table with some keys set, checked again: what was built of it is built again."""
        return type(self).model_validate({**self.model_dump(exclude_unset=True), **values})


class RunTable(ConfigTable):
    """A table that is also made in Python, as a part of a run: by keyword or in the order of its
    fields. What is wrong is one sentence in both places."""

    table: ClassVar[str]

    def __init__(self, *given: Any, **named: Any) -> None:
        fields = type(self).model_fields
        if len(given) > len(fields):
            raise BadInput(
                "wrong-type",
                f"{self.table} is given {len(given)} values in a row, and it has {len(fields)}; "
                f"name them, such as {next(iter(fields))}=…",
            )
        in_order = dict(zip(fields, given, strict=False))
        try:
            super().__init__(**in_order, **named)
        except ValidationError as error:
            raise BadInput(*mistake_of(error, type(self), self.table)) from None

    def __str__(self) -> str:
        return repr(self)

    def stored(self, without: Set[str] = frozenset()) -> dict[str, Any]:
        """What was given, by default too, in the plain values of JSON."""
        return self.model_dump(mode="json", exclude=set(without), exclude_none=True)

    # A table of a file is checked in one go, so that what is wrong is named by its place there.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def changed(self, **values: Any) -> Self:
        """This with some fields replaced, and checked again."""
        return type(self)(**{**self.model_dump(exclude_unset=True), **values})


class OwnFileTable(ConfigTable):
    """A table that may name a function in a file of the user's own."""

    _folder: Path | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _placed(self, info: ValidationInfo) -> Self:
        self._folder = folder_of(info)
        return self

    @property
    def folder(self) -> Path | None:
        """Where the file is looked for first."""
        return self._folder


def _with_tuples(value: Any) -> Any:
    """Plain values with the tuples that lists of JSON represent."""
    if isinstance(value, dict):
        return {key: _with_tuples(one) for key, one in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def folder_of(info: ValidationInfo) -> Path | None:
    """Where files of a user's own are looked for first, as whoever validates the tables says."""
    return (info.context or {}).get("folder")
