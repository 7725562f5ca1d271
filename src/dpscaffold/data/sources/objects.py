"""What people hold in Python as a federation: data frames, datasets, and partitions of them.

pandas and Polars frames, Arrow tables and Hugging Face datasets are read as a file of the same
columns would be: by the same keys (categories, dates, missing values, …), with the same checks.
Datasets of images or vectors, and PyTorch's, become rows of numbers. None of these libraries is
imported: a frame is what hands out Arrow data, a dataset what has a length and items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch
from pydantic import ValidationError

from dpscaffold.data.config import TabularFile
from dpscaffold.data.loading import federation_of_pool, refuse_refills, table_of, target_of
from dpscaffold.data.pool import Pool
from dpscaffold.data.preparation import refuse_redraws
from dpscaffold.data.sentences import mistake_of
from dpscaffold.data.sources.arrays import check_widths, from_huggingface, from_pooled
from dpscaffold.data.tables.missing import NO_NA_STRINGS, NaStrings
from dpscaffold.data.tables.scan import read_table
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation

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
    user_ids: Sequence[Any] | None = None,
    split: str | None = None,
    notify: Callable[[str], None] | None = None,
    **keys: Any,
) -> Federation:
    """Make a federation from a data frame, a dataset, a mapping or list of them (one per user), or
    the partitions of a Flower ``FederatedDataset``.

    Args:
        data: A pandas or Polars frame, an Arrow table, a Hugging Face or PyTorch dataset, a mapping
            or list of these, or a Flower dataset.
        label: The column to predict; a list of columns makes several labels.
        user: The column with the user of each record.
        user_ids: The user of each record, if no column names it.
        split: Which split of a Flower dataset is used.
        notify: Called with what had to be decided.
        **keys: Keys of the ``[data]`` table for files: ``categories``, ``dates``, ``missing``,
            ``na_values``, ``exclude``, ``target``, ``classes``, ``users``, ``partition``,
            ``preprocess``, ``minimum_records``, …

    >>> visits = pa.table({"age": [31, 58, 44, 60], "ill": ["no", "yes", "no", "yes"],
    ...                    "clinic": ["north", "south", "north", "south"]})
    >>> federation_of(visits, label="ill", user="clinic", preprocess=[]).names
    ('north', 'south')
    """
    _require_rows(TITLE, data)
    held = _by_user(data, split)
    objects = {TITLE: data} if held is None else held
    if not objects:
        raise BadInput("no-users", "a federation needs at least one user, and none was given")
    settings = _settings(label, user, held is not None or user_ids is not None, keys)
    refuse_redraws(settings.preprocess)
    refuse_refills(settings)
    pool = _pool(objects, held is not None, label, settings)
    if user_ids is not None:
        pool = _with_users(pool, user_ids)
    return federation_of_pool(pool, settings, notify)


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


def _by_user(data: Any, split: str | None) -> dict[str, Any] | None:
    """One object per user by name, or None where the data are a single object."""
    if callable(getattr(data, "load_partition", None)):
        return _partitions(data, split)
    if split is not None:
        raise BadInput(
            "not-applicable", f"split is {split!r}, and the data have no partitions; leave it out"
        )
    if isinstance(data, Mapping):
        _refuse_splits(data)
        return {str(name): one for name, one in data.items()}
    if _is_single(data):
        return None
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | np.ndarray):
        return {str(i): one for i, one in enumerate(data)}
    raise BadInput(
        "wrong-type",
        f"data are {type(data).__name__}; give a data frame, a dataset, or a mapping or list of "
        f"them, one per user",
    )


def _partitions(data: Any, split: str | None) -> dict[str, Any]:
    """The partitions of a Flower dataset, or of one of its partitioners."""
    partitioners = getattr(data, "partitioners", None)
    if partitioners is None:
        return {str(i): data.load_partition(i) for i in range(int(data.num_partitions))}
    chosen = split or ("train" if "train" in partitioners else next(iter(partitioners), None))
    if chosen not in partitioners:
        raise BadInput(
            "unknown-choice",
            f"split is {chosen!r}, which is not partitioned; there is {', '.join(partitioners)}",
        )
    count = getattr(partitioners[chosen], "num_partitions", partitioners[chosen])
    return {str(i): data.load_partition(i, chosen) for i in range(int(count))}


def _is_single(data: Any) -> bool:
    frame = any(hasattr(data, name) for name in ("__arrow_c_stream__", "iloc", "collect_schema"))
    return frame or _is_dataset(data) or _is_torch(data)


def _is_torch(data: Any) -> bool:
    return isinstance(data, torch.utils.data.Dataset) and not _is_dataset(data)


def _is_dataset(data: Any) -> bool:
    """Whether this is a Hugging Face dataset, whatever its format."""
    return hasattr(data, "column_names") and hasattr(data, "with_format")


def _require_rows(name: str, data: Any) -> None:
    """Refuse what only hands its rows out one after another, or in batches."""
    streamed = _is_dataset(data) and not hasattr(data, "__len__")
    if streamed or isinstance(data, torch.utils.data.DataLoader):
        advice = "its dataset" if not streamed else "a dataset that was loaded without streaming"
        raise BadInput(
            "wrong-type",
            f"{name} is of type {type(data).__name__}, which has no rows to be counted; give "
            f"{advice}",
        )


def _pool(objects: Mapping[str, Any], many: bool, label: Any, settings: ObjectSettings) -> Pool:
    """All records: of tables by their columns, of other datasets as rows of numbers."""
    for name, one in objects.items():
        _require_rows(name, one)
    if all(map(_is_torch, objects.values())):
        return _stacked({n: _items(n, o) for n, o in objects.items()}, many, settings)
    if label is None:
        raise BadInput("missing-argument", "label is missing; name the column to be predicted")
    if any(_is_dataset(one) and _is_nested(one, settings) for one in objects.values()):
        pairs = {name: _rows(one, settings) for name, one in objects.items()}
        return _stacked(pairs, many, settings)
    return _pool_of_tables(objects, many, label, settings)


def _pool_of_tables(
    objects: Mapping[str, Any], many: bool, label: Any, settings: ObjectSettings
) -> Pool:
    """The records of tables, by their columns."""
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
            known = pa.compute.if_else(pa.compute.less(column, 0), None, column)  # -1: no label
            table = table.set_column(place, name, pa.array(names, pa.string()).take(known))
    return table


def _names(data: Any, label: Any) -> tuple[str, ...]:
    """The names that a dataset itself gives the classes of its label."""
    known = _is_dataset(data) and isinstance(label, str)
    features = getattr(data, "features", None) if known else None
    return tuple(getattr((features or {}).get(label), "names", None) or ())


def _is_nested(dataset: Any, settings: ObjectSettings) -> bool:
    """Whether a feature of a Hugging Face dataset is a vector or an image."""
    names = settings.features or [n for n in dataset.column_names if n not in settings.exclude]
    schema = dataset.with_format("arrow")[:1].schema
    kinds = [schema.field(name).type for name in names if name in schema.names]
    return any(pa.types.is_nested(k) or isinstance(k, pa.BaseExtensionType) for k in kinds)


def _rows(
    dataset: Any, settings: ObjectSettings
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], Any]:
    """Features, labels by name, users where a column names them, and what scaled them."""
    if not isinstance(settings.label, str):
        raise BadInput(
            "not-applicable", "label names several columns, and these data are rows; name one"
        )
    left = (settings.label, settings.user, *settings.exclude)
    features = settings.features or tuple(n for n in dataset.column_names if n not in left)
    pool = from_huggingface(
        dataset, settings.label, features, settings.user, target=target_of(settings)
    )
    labels = pool.labels
    if settings.target == "class":
        labels = np.array(pool.target.classes)[pool.labels]
    users = () if pool.users is None else tuple(np.array(pool.names)[pool.users])
    return pool.features, labels, users, pool


def _items(name: str, dataset: Any) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], None]:
    """Features (n, d) and labels (n,) of a PyTorch dataset of pairs."""
    try:
        pairs = [(np.asarray(x, dtype=np.float32).reshape(-1), y) for x, y in dataset]
        x = np.stack([x for x, _ in pairs]) if pairs else np.empty((0, 1), np.float32)
        y = np.array([one.item() if hasattr(one, "item") else one for _, one in pairs])
    except (TypeError, ValueError) as problem:
        raise BadInput(
            "wrong-type",
            f"{name}: items of {type(dataset).__name__} must be pairs (features, label) of one "
            f"shape ({problem})",
        ) from None
    return x, y, (), None


def _refuse_column_keys(settings: ObjectSettings) -> None:
    stray = [k for k in ("categories", "dates") if getattr(settings, k)]
    stray += ["missing"] if settings.missing != "refuse" else []
    stray += [key for key in ("na_values", "values") if getattr(settings, key)]
    if stray:
        raise BadInput(
            "not-applicable",
            f"{stray[0]} is given, which belongs to columns, and these data are rows",
        )


def _stacked(
    parts: Mapping[str, tuple[np.ndarray, np.ndarray, tuple[str, ...], Any]],
    many: bool,
    settings: ObjectSettings,
) -> Pool:
    """Rows of numbers of all users as one pool."""
    _refuse_column_keys(settings)
    features, labels, *_ = zip(*parts.values(), strict=True)
    check_widths(features)
    users: list[str] = []
    for name, (_, y, named, _) in parts.items():
        users += named or [name] * (len(y) * many)
    pool = from_pooled(
        np.concatenate(features),
        np.concatenate(labels),
        np.array(users) if users else None,
        settings.classes or _same_classes(parts, settings),
        TITLE,
        target_of(settings),
    )
    first = next(iter(parts.values()))[3]
    steps = () if first is None else first.preparation
    scaled = [step for step in steps if not _says(step)]
    return replace(pool, preparation=(*scaled, *pool.preparation))


def _says(step: Any) -> bool:
    """Whether a step only says something; what was said of one user's labels holds of all."""
    return type(step).__name__ == "Remark"


def _same_classes(parts: Mapping[str, Any], settings: ObjectSettings) -> tuple[str, ...] | None:
    """The classes that the dataset names itself, where all of its partitions do."""
    pools = [pool for *_, pool in parts.values() if pool is not None]
    if settings.target != "class" or not pools:
        return None
    named = {pool.target.classes for pool in pools if not any(map(_says, pool.preparation))}
    return named.pop() if len(named) == 1 else None


def _with_users(pool: Pool, ids: Sequence[Any]) -> Pool:
    """The user of each record, as it was given."""
    if pool.users is not None:
        raise BadInput(
            "conflicting-arguments",
            "user_ids are given, and the data name the user of each record; leave one out",
        )
    if len(ids) != len(pool):
        raise BadInput(
            "count-differs",
            f"user_ids are given for {len(ids)} records, and there are {len(pool)}; give one each",
        )
    names, codes = np.unique([str(one) for one in ids], return_inverse=True)
    return replace(pool, users=codes.astype(np.int64), names=tuple(str(n) for n in names))
