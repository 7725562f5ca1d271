"""A table of a configuration, as all of them are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo


class ConfigTable(BaseModel):
    """A table of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)

    def changed(self, **values: Any) -> Self:
        """The table with some keys set, checked again: what was built of it is built anew."""
        return type(self).model_validate({**self.model_dump(exclude_unset=True), **values})


def folder_of(info: ValidationInfo) -> Path | None:
    """Where files of a user's own are looked for first, as whoever validates the tables says."""
    return (info.context or {}).get("folder")
