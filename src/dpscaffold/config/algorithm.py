"""``[algorithm]``: a name, and the numbers of what it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, PrivateAttr, ValidationInfo, model_validator

from dpscaffold.algorithms import DEFAULT, SERVERS, Algorithm
from dpscaffold.algorithms.naming import build, numbers_of
from dpscaffold.config.table import OwnFileTable, folder_of


class AlgorithmSettings(OwnFileTable):
    """``[algorithm]``: an entry of ``ALGORITHMS`` or ``my_file:factory``, a server optimiser, and
    the numbers of both, which are the arguments of their factories.

    >>> AlgorithmSettings(name="fedprox").model_dump(exclude_none=True)
    {'name': 'fedprox', 'mu': 0.1}
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=True)

    name: str = DEFAULT
    """The algorithm by name, or your own function as 'my_file:factory'. The file is searched next
    to the configuration. Example: ``"fedprox"``"""
    server: Literal["momentum", "adam"] | None = None
    """An optimiser at the server, wrapped around the algorithm. Example: ``"momentum"``"""
    _built: Algorithm = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any, info: ValidationInfo) -> Any:
        """Spell the numbers out."""
        if not isinstance(given, Mapping):
            return given
        name, server = given.get("name", DEFAULT), given.get("server")
        if not isinstance(name, str) or server not in (None, *SERVERS):
            return given
        numbers = {key: value for key, value in given.items() if key not in ("name", "server")}
        return {**given, **numbers_of(name, server, numbers, folder_of(info))}

    @model_validator(mode="after")
    def _checked(self) -> AlgorithmSettings:
        self._built = build(self.name, self.server, self.model_extra or {}, self._folder)
        return self

    def build(self) -> Algorithm:
        """The algorithm, which was built when the table was checked."""
        return self._built
