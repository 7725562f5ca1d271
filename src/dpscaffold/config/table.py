"""A table of a configuration, as all of them are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from dpscaffold.errors import BadValue


class ConfigTable(BaseModel):
    """A table of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, given: Any, info: ValidationInfo) -> Any:
        """``true`` is no 1: a switch where a number stands is a mistake."""
        if isinstance(given, dict):
            for key, value in given.items():
                if isinstance(value, bool) and cls._number(key):
                    raise BadValue(
                        "not-a-number",
                        f"{key} is {str(value).lower()}, which is no number; give one",
                    )
        # What a validator has seen is no JSON any more, and strictly no list is a tuple then.
        return _with_tuples(given) if info.mode == "json" else given

    @classmethod
    def _number(cls, key: str) -> bool:
        """Whether a key is a number, and no switch."""
        if key not in cls.model_fields:
            return False
        annotation = cls.model_fields[key].annotation
        kinds = {annotation, *get_args(annotation)}
        return not kinds.isdisjoint((int, float)) and bool not in kinds

    def changed(self, **values: Any) -> Self:
        """The table with some keys set, checked again: what was built of it is built again."""
        return type(self).model_validate({**self.model_dump(exclude_unset=True), **values})


def _with_tuples(value: Any) -> Any:
    """Plain values with the tuples that lists of JSON represent."""
    if isinstance(value, dict):
        return {key: _with_tuples(one) for key, one in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def folder_of(info: ValidationInfo) -> Path | None:
    """Where files of a user's own are looked for first, as whoever validates the tables says."""
    return (info.context or {}).get("folder")
