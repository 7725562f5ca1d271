"""From settings to a federation: read a pool, partition it, preprocess it; or do so from file to
file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpscaffold.atomic import draft_of
from dpscaffold.data.allocation import (
    PARTITIONED_BY_NUMBER,
    allocate,
    drafted,
    left_out,
    named,
    too_small,
)
from dpscaffold.data.config import (
    Cifar10,
    Csv,
    Digits,
    Emnist,
    Emnist47,
    FashionMnist,
    Mnist,
    Npz,
    Pooled,
    Saved,
    Synthetic,
    TabularFile,
    kind_in,
    parse_data,
    range_of,
)
from dpscaffold.data.pool import Pool, numbered, offsets, partitioned, split_rows, steps_of
from dpscaffold.data.preparation import fit
from dpscaffold.data.prepared import after, transformed
from dpscaffold.data.sources import cifar, images
from dpscaffold.data.sources.arrays import read_npz
from dpscaffold.data.storage import load, save
from dpscaffold.data.synthesis import synthetic
from dpscaffold.data.tables.cells import Spellings
from dpscaffold.data.tables.dialect import Dialect
from dpscaffold.data.tables.missing import NaStrings
from dpscaffold.data.tables.scan import (
    Scan,
    feature_blocks,
    identifiers_in,
    read_table,
    scan_table,
)
from dpscaffold.data.tables.source import Identifiers, TableSource
from dpscaffold.data.writer import FederationWriter, require_free
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, Records
from dpscaffold.federation.schema import Kind, Target
from dpscaffold.privacy import Remark

#: Told what a reader decided, one sentence at a time.
Notify = Callable[[str], None]


def load_federation(
    settings: Any = None, notify: Notify | None = None, release: bool = False
) -> Federation:
    """The federation that a ``[data]`` table (a dict or its parsed settings) describes.

    ``notify`` is called with what a reader had to decide: how labels are numbered, which records
    were left out. ``release`` draws the noise of private preprocessing from the operating system,
    for a federation that is stored at once and used from there (:func:`prepare`).

    >>> load_federation({"source": "digits", "users": 5, "similarity": 0})
    Federation(digits, 0 % similar: 5 users, 287 train records each, 64 features, 10 classes)
    """
    settings = (
        parse_data(settings or {}) if settings is None or isinstance(settings, dict) else settings
    )
    federation = _load(settings, notify, release)
    sizes = settings.declared_sizes
    if sizes is None:
        return federation
    if isinstance(settings, Pooled) and settings.chosen_partition != "natural":
        dealt_out = Remark(PARTITIONED_BY_NUMBER, "none needed", counted=True)
        federation = replace(federation, preparation=(*federation.preparation, dealt_out))
    return federation.declaring(sizes)


def _load(settings: Any, notify: Notify | None, release: bool) -> Federation:
    if isinstance(settings, Synthetic):
        _check_size(settings)
        given = settings.model_dump(exclude={"source", "declared_sizes", "features"})
        return synthetic(**given, dimension=settings.features)
    if isinstance(settings, Saved):
        return load(Path(settings.path).expanduser())
    return federation_of_pool(read_pool(settings), settings, notify, release)


def federation_of_pool(
    pool: Pool, settings: Pooled, notify: Notify | None = None, release: bool = False
) -> Federation:
    """Partition a pool among users and prepare it, as the settings say."""
    for note in (*pool.notes, *_scale_notes(pool, settings)) if notify else ():
        notify(note)  # type: ignore[misc]
    parts, names = allocate(pool.labels, pool.users, pool.names, settings)
    gone = too_small(pool.users, pool.names, settings)
    if gone and notify:
        notify(f"warning: {named(gone)}")
    pool = replace(
        pool,
        title=_title(pool.title, settings),
        preparation=pool.preparation + left_out(settings, gone) + drafted(settings),
        coded=True,
    )
    return _assembled(pool, parts, names, settings, release)


def _scale_notes(pool: Pool, settings: Pooled) -> list[str]:
    """That the default steps do not suit arrays whose columns have different scales."""
    if not isinstance(settings, Npz) or "preprocess" in settings.model_fields_set:
        return []
    if one_scale(np.asarray(pool.features)):
        return []
    return [
        "warning: columns have different scales, and data.preprocess is ['unit-norm'] by default, "
        "in which the largest columns hide the others; set data.preprocess = ['standardise', "
        "'unit-norm'], or scale the columns by public ranges"
    ]


#: Columns are of one scale where no deviation is larger than this many times the median.
ONE_SCALE = 10.0


def one_scale(rows: np.ndarray) -> bool:
    """Whether columns are bytes (pixels), bounded, or have deviations of a similar size, as
    principal components do."""
    if rows.dtype == np.uint8:
        return True
    if rows.dtype.kind not in "iufb" or not np.isfinite(rows).all():
        return False
    if (np.abs(rows) <= 1).all():
        return True
    deviations = rows.std(axis=0, dtype=np.float64)
    return bool(deviations.max() <= ONE_SCALE * np.median(deviations))


def _assembled(
    pool: Pool, parts: list[np.ndarray], names: tuple[str, ...], settings: Pooled, release: bool
) -> Federation:
    """The federation of these parts after its preprocessing. The tables are looked through once,
    as they will be used; where they cannot be, the raw ones may say why in fewer words."""
    names = names or numbered(parts)
    train, test = partitioned(pool, parts, settings.test_ratio, settings.seed, names)
    _check_labels(train, pool.title, pool.target)
    target, title = pool.target, pool.title
    try:
        fitted = fit(train.features, settings.preprocess, settings.seed, release)
        ready, steps = (after(train, fitted), after(test, fitted)), steps_of(pool) + fitted
        return Federation(ready[0], ready[1], target, names, title, steps).validated()
    except Exception:
        Federation(train, test, target, names, title).validated()
        raise


def _check_size(settings: Synthetic) -> None:
    """Refuse synthetic data that this machine cannot hold, before trying."""
    needed = 4 * settings.users * settings.records * (settings.features + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise BadInput(
            "memory-exceeded",
            f"data.users × data.records is {settings.users} × {settings.records}, which takes "
            f"{needed / 1e9:,.0f} GB of {memory / 1e9:,.0f} GB of memory; use fewer",
        )


def read_pool(settings: Pooled) -> Pool:
    """The records of a source before they belong to users."""
    match settings:
        case Mnist():
            return images.mnist(settings.path)
        case FashionMnist():
            return images.fashion_mnist(settings.path)
        case Emnist():
            return images.emnist(settings.path)
        case Emnist47():
            return images.emnist47(settings.path)
        case Cifar10():
            return cifar.cifar10(settings.path)
        case Digits():
            return images.digits()
        case TabularFile():
            return read_table(table_of(settings))
        case Npz():
            return read_npz(Path(settings.path).expanduser(), target_of(settings))
    raise TypeError(f"{type(settings).__name__} is not a pooled source")


def target_of(settings: TabularFile | Npz) -> Kind | Target:
    """What is predicted, as far as the settings say."""
    found = range_of(settings)
    return kind_in(settings.target) if found is None else found.target


def table_of(settings: TabularFile) -> TableSource:
    """The file and the meaning of its columns."""
    given = settings.categories
    categories: dict[str, Any] = dict(given) if isinstance(given, dict) else dict.fromkeys(given)
    dialect = Dialect()
    if isinstance(settings, Csv):
        dialect = Dialect(settings.delimiter, settings.encoding, settings.decimal)
    return TableSource(
        Path(settings.path).expanduser(),
        "csv" if isinstance(settings, Csv) else "parquet",
        settings.label,
        settings.user,
        settings.features,
        categories,
        settings.missing,
        settings.classes,
        dialect,
        target_of(settings),
        settings.exclude,
        settings.dates,
        settings.unseen,
        na_values=NaStrings.given(settings.na_values),
        values=Spellings.given(settings.values),
        absent=settings.absent,
        ranges=settings.ranges,
    )


def prepare(
    settings: Any, folder: str | Path, overwrite: bool = False, notify: Notify | None = None
) -> Path:
    """Store the federation of a ``[data]`` table in a folder, from which it loads quickly.

    Tables are streamed from file to file and may exceed memory; so may a stored federation. The
    noise of private steps comes from the operating system.

    Args:
        settings: The ``[data]`` table, as a dict or parsed.
        folder: The folder to write.
        overwrite: Replace a prepared federation that already exists.
        notify: Called with what a reader had to decide.
    """
    settings = parse_data(settings) if isinstance(settings, dict) else settings
    if settings.declared_sizes is not None:
        raise BadInput(
            "not-applicable",
            "data.declared_sizes belongs to the configuration that trains; leave it out here and "
            "give it together with source = 'saved'",
        )
    require_free(Path(folder), overwrite)  # before the work, not after it
    if not isinstance(settings, TabularFile):
        return save(load_federation(settings, notify, release=True), folder, overwrite)
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(folder.with_name(f"{folder.name}.raw"))
    except OSError as problem:
        raise BadInput("cannot-write", f"{folder} cannot be written: {problem.strerror}") from None
    try:
        raw = _stream(settings, draft, notify)
        return preprocess_to(raw, settings.preprocess, folder, overwrite)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def preprocess_to(
    federation: Federation,
    steps: Iterable[Any],
    folder: str | Path,
    overwrite: bool = False,
) -> Path:
    """Preprocess a federation into a folder, block by block, without loading it. The noise of
    private steps comes from the operating system.

    Args:
        federation: The federation.
        steps: The steps in order, such as ``["standardise", "unit-norm"]``.
        folder: The folder to write.
        overwrite: Replace a prepared federation that already exists.
    """
    fitted = fit(federation.train.features, steps, release=True)
    steps = federation.preparation + fitted
    with FederationWriter(folder, federation.target, federation.title, steps, overwrite) as writer:
        for part, table in (("train", federation.train), ("test", federation.test)):
            writer.append_table(
                part, transformed(table.features, fitted), table.labels, table.sizes
            )
        writer.names = list(federation.names)
    return Path(folder)


def _mapped_table(scan: Scan, rows: Sequence[np.ndarray], path: Path, clip: bool) -> Records:
    """The records of these rows of each user, with room for their features in a mapped file."""
    joined = np.concatenate(rows)
    shape = (len(joined), scan.dimension)
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    labels = torch.from_numpy(scan.labels[joined])
    table = Records(torch.from_numpy(mapped), labels, offsets([len(part) for part in rows]))
    return table if scan.target.low is None else table.scaled(scan.target, clip)


def _write_features(
    scan: Scan, tables: Sequence[Records], split: Sequence[Sequence[np.ndarray]]
) -> Identifiers:
    """Read the features block by block into the tables; what looks like an identifier is noted."""
    place = np.full((len(tables), len(scan.labels)), -1, dtype=np.int64)
    for which, rows in enumerate(split):
        joined = np.concatenate(rows)
        place[which, joined] = np.arange(len(joined))
    identifiers = identifiers_in(scan)
    for start, block in feature_blocks(scan):
        identifiers.add(block)
        for which, table in enumerate(tables):
            target = place[which, start : start + len(block)]
            table.features.numpy()[target[target >= 0]] = block[target >= 0]
    return identifiers


def _stream(settings: TabularFile, folder: Path, notify: Notify | None) -> Federation:
    """The raw federation of a table, its features written to mapped files in ``folder``."""
    scan = scan_table(table_of(settings))
    for note in scan.notes if notify else ():
        notify(note)  # type: ignore[misc]
    parts, names = allocate(scan.labels, scan.users, scan.user_names, settings)
    gone = too_small(scan.users, scan.user_names, settings)
    if gone and notify:
        notify(f"warning: {named(gone)}")
    names = names or tuple(str(i) for i in range(len(parts)))
    split = split_rows(parts, names, settings.test_ratio, settings.seed)
    tables = [
        _mapped_table(scan, rows, folder / f"{which}.npy", clip=which == 0)
        for which, rows in enumerate(split)
    ]
    identifiers = _write_features(scan, tables, split)
    for note in (*scan.seen.notes(scan.table.na_values), *identifiers.notes()) if notify else ():
        notify(note)  # type: ignore[misc]
    title = _title(settings.path.rsplit("/", 1)[-1], settings)
    federation = Federation(
        tables[0],
        tables[1],
        scan.target,
        names,
        title,
        preparation=scan.preparation + left_out(settings, gone) + drafted(settings),
        mapped=True,
    )
    _check_labels(tables[0], title, scan.target)
    return federation.validated()


def _check_labels(train: Records, title: str, target: Target) -> None:
    """Refuse records from which nothing can be learnt."""
    seen = torch.unique(train.labels)
    if len(seen) < 2 and target.kind == "labels":
        raise BadInput(
            "single-class",
            f"{title}: all training records have the same labels; there is nothing to learn",
        )
    if len(seen) < 2:
        classes = "a classifier needs at least 2 classes"
        advice = classes if target.kind == "class" else "there is nothing to learn"
        found = target.restored(seen)[0]
        raise BadInput(
            "single-class", f"{title}: all training records have the label {found:g}; {advice}"
        )


def _title(base: str, settings: Pooled) -> str:
    """One line for tables and figures."""
    how = {
        "similarity": f", {settings.similarity:g} % similar",
        "dirichlet": f", Dirichlet({settings.alpha:g})",
        "natural": "",
    }
    return base + how[settings.chosen_partition]
