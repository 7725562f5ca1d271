"""Tables that people hold in Python as a federation.

pandas and Polars frames, Arrow tables and Hugging Face datasets are read as a file of the same
columns would be: by the same keys (categories, dates, missing values, …), with the same checks.
None of these libraries but Arrow's is imported: a frame is what hands out Arrow data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from dpscaffold.data.config import TabularFile
from dpscaffold.data.loading import federation_of_pool, table_of
from dpscaffold.data.pool import Pool
from dpscaffold.data.sentences import mistake_of
from dpscaffold.data.tables.missing import NO_NA_STRINGS, NaStrings
from dpscaffold.data.tables.scan import read_table
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    from dpscaffold.data.tables.arrow import pa, pc

TITLE = "your data"


class ObjectSettings(TabularFile):
    """The keys of ``[data]`` for data that are held already; ``many``: one object per user."""

    source: Literal["held"] = "held"
    path: str = TITLE
    label: str | tuple[str, ...] = "label"
    many: bool = False

    @property
    def has_users(self) -> bool:
        return self.user is not None or self.many


def federation_of(
    data: Any,
    label: str | Sequence[str] | None = None,
    user: str | None = None,
    *,
    notify: Callable[[str], None] | None = None,
    **keys: Any,
) -> Federation:
    """Make a federation from a data frame, or from a mapping or list of them (one per user).

    Images, vectors and other rows of numbers are arrays: :func:`from_users` and
    :func:`from_pooled` take them.

    Args:
        data: A pandas or Polars frame, an Arrow table, a Hugging Face dataset of plain columns, or
            a mapping or list of these.
        label: The column to predict; a list of columns makes several labels.
        user: The column with the user of each record.
        notify: Called with what had to be decided.
        **keys: Keys of the ``[data]`` table for files: ``categories``, ``dates``, ``missing``,
            ``na_values``, ``exclude``, ``target``, ``classes``, ``users``, ``partition``,
            ``preprocess``, ``minimum_records``, …

    >>> visits = pa.table({"age": [31, 58, 44, 60], "ill": ["no", "yes", "no", "yes"],
    ...                    "clinic": ["north", "south", "north", "south"]})
    >>> federation_of(visits, label="ill", user="clinic", preprocess=[]).names
    ('north', 'south')
    """
    held = _by_user(data)
    objects = {TITLE: data} if held is None else held
    if not objects:
        raise BadInput("no-users", "a federation needs at least one user, and none was given")
    settings = _settings(label, user, held is not None, keys)
    return federation_of_pool(_pool(objects, held is not None, label, settings), settings, notify)


def _settings(label: Any, user: str | None, many: bool, keys: Mapping[str, Any]) -> ObjectSettings:
    given = {"label": label} if label is not None else {}
    try:
        return ObjectSettings.model_validate({**given, "user": user, "many": many, **keys})
    except ValidationError as problem:
        raise BadInput(*mistake_of(problem, ObjectSettings, "data")) from None


def _refuse_splits(data: Mapping[Any, Any]) -> None:
    if {"train", "test", "validation"} & set(data) and all(map(_is_dataset, data.values())):
        raise BadInput(
            "split-not-chosen",
            f"the data are splits ({', '.join(map(str, data))}), not users; choose one, such as "
            f"dataset['train']",
        )


def _by_user(data: Any) -> dict[str, Any] | None:
    """One object per user by name, or None where the data are a single object."""
    if isinstance(data, Mapping):
        _refuse_splits(data)
        return {str(name): one for name, one in data.items()}
    if _is_table(data):
        return None
    if isinstance(data, list | tuple):
        return {str(i): one for i, one in enumerate(data)}
    raise _not_a_table("data", data)


def _not_a_table(name: str, data: Any) -> BadInput:
    return BadInput(
        "wrong-type",
        f"{name} is of type {type(data).__name__}; give a data frame, or a mapping or list of "
        f"them, one per user (for arrays, from_users or from_pooled)",
    )


def _is_table(data: Any) -> bool:
    """Whether this has columns and rows that can be counted."""
    frame = any(hasattr(data, name) for name in ("__arrow_c_stream__", "iloc", "collect_schema"))
    return frame or (_is_dataset(data) and hasattr(data, "__len__"))


def _is_dataset(data: Any) -> bool:
    """Whether this is a Hugging Face dataset, whatever its format."""
    return hasattr(data, "column_names") and hasattr(data, "with_format")


def _pool(objects: Mapping[str, Any], many: bool, label: Any, settings: ObjectSettings) -> Pool:
    """All records, by their columns."""
    for name, one in objects.items():
        if not _is_table(one):
            raise _not_a_table(name, one)
    if label is None:
        raise BadInput("missing-argument", "label is missing; name the column to be predicted")
    source = table_of(settings)
    tables = tuple((name, arrow_table(one, source.na_values)) for name, one in objects.items())
    source = replace(source, kind="held", held=tables, many=many)
    names = next((names for one in objects.values() if (names := _names(one, label))), ())
    if names and not settings.classes and settings.target == "class":
        source = replace(source, classes=names)
    return replace(read_table(source), title=TITLE)


def arrow_table(data: Any, na_values: NaStrings = NO_NA_STRINGS) -> pa.Table:
    """A frame or dataset as an Arrow table; numbered classes that have names get them. Where there
    are ``na_values``, columns of Python's own values may mix numbers with texts."""
    data = data.collect() if hasattr(data, "collect_schema") and hasattr(data, "collect") else data
    try:
        if _is_dataset(data):
            return _named_classes(data, data.with_format("arrow")[:])
        if hasattr(data, "iloc"):
            return pa.Table.from_pandas(_as_texts(data, na_values), preserve_index=False)
        return pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as problem:
        what = str(problem).strip().splitlines() or [type(problem).__name__]
        raise BadInput(
            "mixed-column",
            f"data of type {type(data).__name__} cannot be read as a table ({what[0]}); make each "
            f"column hold one kind of value",
        ) from None


def _mixes_texts(values: Iterable[Any]) -> bool:
    return len({isinstance(value, str) for value in values}) > 1


def _as_texts(frame: Any, na_values: NaStrings) -> Any:
    """A pandas frame whose columns that mix texts with other values are texts, where markers are
    among them; Arrow would take no such column."""
    marked = [
        name for name in frame.columns if na_values.of(str(name)) and frame[name].dtype == object
    ]
    mixed = [name for name in marked if _mixes_texts(frame[name].dropna())]
    if not mixed:
        return frame
    out = frame.copy(deep=False)
    for name in mixed:
        gone = frame[name].isna()
        pairs = zip(frame[name], gone, strict=True)
        out[name] = [None if lacking else str(value) for value, lacking in pairs]
    return out


def _named_classes(dataset: Any, table: pa.Table) -> pa.Table:
    for place, name in enumerate(table.column_names):
        names = getattr((getattr(dataset, "features", None) or {}).get(name), "names", None)
        if names and pa.types.is_integer(table.schema.field(name).type):
            column = table.column(name).combine_chunks()
            known = pc.if_else(pc.less(column, 0), None, column)  # -1: no label
            table = table.set_column(place, name, pa.array(names, pa.string()).take(known))
    return table


def _names(data: Any, label: Any) -> tuple[str, ...]:
    """The names that a dataset itself gives the classes of its label."""
    known = _is_dataset(data) and isinstance(label, str)
    features = getattr(data, "features", None) if known else None
    return tuple(getattr((features or {}).get(label), "names", None) or ())
