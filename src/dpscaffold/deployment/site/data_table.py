"""``[data]`` of a site, and ``[evaluate]`` of a server: which file, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from dpscaffold.data.meanings import CsvFormat, Gaps, Stored
from dpscaffold.data.sentences import mistake_of
from dpscaffold.data.tables.dialect import AUTO
from dpscaffold.errors import BadInput, BadValue


class _SiteFile(Stored):
    path: str
    """The file, relative to this one or absolute. It is read by the plan's [schema]. Value: a path.
    Example: ``"records.csv"``"""


class SiteCsv(_SiteFile, CsvFormat):
    """A site's CSV file. The keys are those of a ``[data]`` table, but nothing is guessed: what is
    guessed from all records would let one record change how the others are read."""

    source: Literal["csv"]

    @model_validator(mode="after")
    def _declared(self) -> SiteCsv:
        for name in ("delimiter", "encoding", "decimal"):
            if getattr(self, name) == AUTO:
                raise BadValue(
                    "auto-at-site",
                    f"data.{name} is 'auto', and a site declares how its file is written, since a "
                    f"guess would depend on its records; name it",
                )
        check_encoding(self.encoding)
        return self


class SiteParquet(_SiteFile, Gaps):
    """A site's Parquet file."""

    source: Literal["parquet"]


class SiteArrays(_SiteFile):
    """A site's ``.npz`` file with ``features`` and ``labels``."""

    source: Literal["npz"]


SiteData = SiteCsv | SiteParquet | SiteArrays
#: The sources that a site may have, and the model of the table of each.
SOURCES: dict[str, type[SiteCsv] | type[SiteParquet] | type[SiteArrays]] = {
    "csv": SiteCsv,
    "parquet": SiteParquet,
    "npz": SiteArrays,
}


def check_encoding(name: str) -> None:
    """Refuse an encoding that is unknown, or in which lines cannot be told apart."""
    try:
        end = "\n".encode(name)
    except (LookupError, UnicodeError):
        raise BadValue(
            "unknown-encoding",
            f"data.encoding is {name!r}, which is not known; name one, such as 'utf-8' or 'cp1252'",
        ) from None
    if end != b"\n" and name.lower() not in ("utf-16", "utf-16-le", "utf-16-be"):
        raise BadValue(
            "encoding-not-supported",
            f"data.encoding is {name!r}, whose lines a site cannot tell apart; save it as UTF-8",
        )


def site_data(table: Mapping[str, Any]) -> SiteData:
    """``[data]`` of a site, or a refusal that says what is wrong with it."""
    source = table.get("source")
    if source not in SOURCES:
        raise BadInput(
            "unknown-source", f"data.source is {source!r}; a site's is one of {', '.join(SOURCES)}"
        )
    for key in table:
        if key not in SOURCES[source].model_fields:
            raise BadInput(
                "not-applicable",
                f"data.{key} is not of a site's {source} data; the schema comes with the offer, "
                f"and all records are training records of this one user",
            )
    try:
        return SOURCES[source].model_validate(dict(table))
    except ValidationError as problem:
        raise BadInput(*mistake_of(problem, SOURCES[source], "data")) from None
