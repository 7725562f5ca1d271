"""A drafted configuration: TOML with a word beside every guess."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dpscaffold.data.config import BLANK
from dpscaffold.data.sources.arrays import npz_arrays, read_npz
from dpscaffold.data.tables.drafted_run import MOST_NORM, dealt, row_norm, run_lines, standardised
from dpscaffold.data.tables.files import AUTO
from dpscaffold.data.tables.label_guesses import is_measured, rounded_range
from dpscaffold.data.tables.looking import LEAST_RECORDS, ColumnProfile, Look
from dpscaffold.data.tables.spellings import toml_key, toml_text, written
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Kind, Target, kind_of

OUTSIDE = (
    "Looking at private data to write a configuration is outside epsilon: no guarantee covers what "
    "these guesses, or your corrections, tell about the records."
)
HEAD = f"""# Drafted by dpscaffold init. Check every line: these are guesses.
# {OUTSIDE}
"""


#: What a draft for a release says first.
BLANKS = f"""# For a model that you will publish. Replace every "{BLANK}" by what is known without
# looking at the records, then run dpscaffold train --release.
"""


def draft(found: Look, epsilon: float, release: bool = False) -> str:
    """The configuration of a table that was looked at; for a ``release`` with blanks for what must
    be public."""
    norm = _public_norm(found) if release else row_norm(_columns(found))
    lines = [
        HEAD,
        *([BLANKS] if release else []),
        f"# {found.rows} rows were looked at, drawn from all.",
        "[data]",
        _DRAFTED,
        f'source = "{found.kind}"',
        f"path = {toml_text(found.path.as_posix())}{_files(found)}",
        *_dialect(found),
        *_label(found),
        *_target(found.target, release),
        *(f"user = {toml_text(c.name)}  # whose a record is: {c.why}" for c in found.of("user")),
        *_without_users(found),
        *_features(found, release),
        f"minimum_records = {LEAST_RECORDS}  # smaller users are left out, and named",
        *([f'preprocess = ["clip-norm:{norm:g}"]'] if release else standardised(norm)),
        *run_lines(
            found.sizes if found.users else dealt(sum(found.sizes.values())),
            found.target.kind,
            norm,
            len(found.of("label")),
            epsilon,
        ),
        *([_RELEASE] if release else []),
    ]
    return "\n".join(lines) + "\n"


_DRAFTED = "drafted = true  # the privacy statement says that init looked at the records"
_RELEASE = "release = true  # what would be outside the guarantee is refused"


def draft_arrays(path: Path, epsilon: float, release: bool = False) -> str:
    """The configuration of an ``.npz`` file with features, labels and perhaps users; for a
    ``release`` with blanks for what must be public."""
    arrays = npz_arrays(path)
    labels, users = arrays.get("labels"), arrays.get("users")
    if labels is None or "features" not in arrays:
        raise BadInput(
            f"{path} holds {', '.join(arrays) or 'nothing'}; it needs arrays 'features' and "
            f"'labels'"
        )
    target: Target | Kind = "class"
    if labels.ndim == 2:
        target = "labels"
    elif labels.dtype.kind in "iuf" and np.isfinite(labels).all() and is_measured(labels):
        low, high = rounded_range(labels)
        target = Target("number", low=low, high=high)
    if users is not None and len(_sizes(users)) < 2:
        raise BadInput(
            f"{path} names {len(_sizes(users))} user; federated training needs two or more"
        )
    if labels.ndim == 1 and len(np.unique(labels)) < 2:
        raise BadInput(f"{path}: labels hold a single value, so there is nothing to learn")
    lines = [HEAD, *([BLANKS] if release else []), "[data]", _DRAFTED, 'source = "npz"']
    lines.append(f"path = {toml_text(path.as_posix())}")
    if isinstance(target, Target):
        lines += _target(target, release)
    if target == "labels":
        lines.append('target = "labels"  # a column of 0 and 1 for each label')
    if users is None:
        users_line = f"users = {len(dealt(len(labels)))}"
        lines += [f"{users_line}  # the file names none: records are dealt out at random", *_SPLIT]
    else:
        lines.append('partition = "natural"  # the file says whose each record is')
    read_npz(path, target)  # what train would refuse is refused before anything is written
    sizes = dealt(len(labels)) if users is None else _sizes(users)
    norm = row_norm(int(np.prod(arrays["features"].shape[1:])))
    lines += _public_steps(norm) if release else standardised(norm)
    lines += run_lines(sizes, kind_of(target), norm, labels[0].size, epsilon)
    lines += [_RELEASE] if release else []
    return "\n".join(lines) + "\n"


def _sizes(users: np.ndarray) -> dict[str, int]:
    """The records of every user."""
    names, counts = np.unique(users, return_counts=True)
    return dict(zip(map(str, names), map(int, counts), strict=True))


_SPLIT = ['partition = "similarity"', "similarity = 100.0  # all users alike"]


def _files(found: Look) -> str:
    if found.by_file:
        return f"  # {found.users} files, one per user"
    return "" if not found.path.is_dir() else "  # all files of the folder"


def _dialect(found: Look) -> list[str]:
    if found.kind != "csv":
        return []
    dialect = found.dialect
    comment = [f"comment = {toml_text(dialect.comment)}  # such lines are skipped"]
    lines = comment if dialect.comment else []
    if dialect.header != 1:
        shown = dialect.header if isinstance(dialect.header, int) else toml_text(dialect.header)
        lines.append(f"header = {shown}  # the line of the columns' names; none above is read")
    if AUTO in (dialect.delimiter, dialect.encoding, dialect.decimal):
        return [
            "# The files are written differently; each is read as it is.",
            'encoding = "auto"',
            'delimiter = "auto"',
            'decimal = "auto"',
            *lines,
        ]
    return [
        f"encoding = {toml_text(dialect.encoding)}",
        f"delimiter = {toml_text(dialect.delimiter)}",
        f"decimal = {toml_text(dialect.decimal)}",
        *lines,
    ]


def _label(found: Look) -> list[str]:
    columns = found.of("label")
    if found.target.kind == "labels":
        listed = ", ".join(toml_text(column.name) for column in columns)
        return [f"label = [{listed}]  # several labels of 0 and 1: {columns[0].why}"]
    return [
        line
        for column in columns
        for line in (
            f"label = {toml_text(column.name)}  # {column.why.partition(';')[0]}",
            *_spellings(column),
        )
    ]


def _spellings(column: ColumnProfile) -> list[str]:
    """The other spellings of a column's values, and those that may be typing errors."""
    lines = []
    if column.same:
        lines.append(
            f"{written(column.name, column.same)}  # guessed to be one value: remove what is not"
        )
    if column.errors:
        more = {value: list(listed) for value, listed in column.same.items()}
        for text, value in column.errors.items():
            more.setdefault(value, []).append(text)
        instead = ", instead of the line above" if column.same else ""
        lines += [
            f"# {toml_text(column.name)} holds {', '.join(map(toml_text, column.errors))}, each a "
            f"value of its own. If these are typing errors{instead}:",
            f"# {written(column.name, more)}",
        ]
    return lines


def _target(target: Target, release: bool = False) -> list[str]:
    """The range of a number to predict, and why it is asked for; for a release blanks, for it and
    for the names of classes."""
    if release and target.kind == "class":
        return [f'classes = "{BLANK}"  # the labels in order, such as ["no", "yes"]']
    if target.kind != "number":
        return []
    if release:
        return [
            "# The smallest and the largest number that the label can be; predictions have its own",
            "# units. (If its values are classes, remove the line.)",
            f'target = {{ kind = "number", low = "{BLANK}", high = "{BLANK}" }}',
        ]
    return [
        "# The label is predicted as a number: it has fractions or many values. (If its values are",
        "# classes, remove the line.) low and high were guessed from the data, outside epsilon:",
        "# write the range that the number can have, known without looking. Training maps it to",
        "# [-1, 1], and a number beyond an end counts as the end; predictions have its own units.",
        f'target = {{ kind = "number", low = {target.low:.12g}, high = {target.high:.12g} }}',
    ]


def _without_users(found: Look) -> list[str]:
    if found.by_file or found.of("user"):
        return []
    users = len(dealt(sum(found.sizes.values())))
    said = "no column names a site: records are dealt out at random; or user = COLUMN"
    return [f"users = {users}  # {said}", *_SPLIT]


def _features(found: Look, release: bool) -> list[str]:
    """Which columns are what, one line each where a word is needed."""
    lines = []
    if left := found.of("left out"):
        lines.append("exclude = [")
        lines += [f"  {toml_text(c.name)},  # {c.why}" for c in left]
        lines.append("]")
    coded = found.of("category")
    if coded and release:
        lines.append("# The values of every category; another value counts as none of them.")
        lines += [f'categories.{toml_key(c.name)} = "{BLANK}"  # such as ["a", "b"]' for c in coded]
        lines.append('unseen = "zero"')
    elif coded:
        lines.append("# Their values are read off the data, outside epsilon, unless you give them:")
        lines.append(f"# categories = {{ {toml_text(coded[0].name)} = {_values(coded[0])} }}")
        lines.append(f"categories = [{', '.join(toml_text(c.name) for c in coded)}]")
    lines += [line for c in coded for line in _spellings(c)]
    if lacking := [c for c in found.columns if c.absent and c.role != "left out"]:
        listed = ", ".join(toml_text(c.name) for c in lacking)
        lines.append(f"absent = [{listed}]  # some files lack them: missing values there")
    if dated := found.of("date"):
        pairs = ", ".join(f"{toml_text(c.name)} = {_forms(c)}" for c in dated)
        lines.append(f"dates = {{ {pairs} }}  # days since 1970")
    measured = [c for c in found.columns if c.role in ("number", "date")]
    if measured and release:
        lines.append(
            "# The range of every number, mapped to -1 to 1; others count as an end of it."
        )
        days, numbers = '["2020-01-01", "2029-12-31"]', "[0, 100]"
        lines += [
            f'ranges.{toml_key(c.name)} = "{BLANK}"  # such as {days if c.forms else numbers}'
            for c in measured
        ]
    return [*lines, *_gaps(found), *_missing(found, release)]


def _forms(column: ColumnProfile) -> str:
    listed = ", ".join(map(toml_text, column.forms))
    return listed if len(column.forms) == 1 else f"[{listed}]"


def _values(column: ColumnProfile) -> str:
    shown = [toml_text(value) for value in column.values[:4]]
    return f"[{', '.join(shown)}{', …' if len(column.values) > 4 else ''}]"


def _gaps(found: Look) -> list[str]:
    """Texts that are taken for missing values, a line a column, and those that only might be."""
    lines = []
    for column in found.columns:
        if column.gaps:
            count, kind = sum(column.gaps.values()), "dates" if column.role == "date" else "numbers"
            said = (
                f"{kind} but for these, in {count} of {found.rows} rows: they seem to mean missing"
            )
            lines.append(f"{_marked(column, column.gaps)}  # {said}")
        if column.maybe:
            shown = ", ".join(f"{toml_text(text)} in {n}" for text, n in column.maybe.items())
            instead = ", instead of the line above" if column.gaps else ""
            lines += [
                f"# {toml_text(column.name)} holds {shown} of {found.rows} rows, read as a value:",
                f"# only you can tell. If it means missing{instead}:",
                f"# {_marked(column, {**column.gaps, **column.maybe})}",
            ]
    return lines


def _marked(column: ColumnProfile, texts: Iterable[str]) -> str:
    return f"gaps.{toml_text(column.name)} = [{', '.join(map(toml_text, texts))}]"


def _missing(found: Look, release: bool) -> list[str]:
    """Rules that read nothing off the records: an indicator beside a zero, a further category. In
    a release no record is left out: how many were would tell of them."""
    rules = [
        f'{toml_text(c.name)} = "{"category" if c.role == "category" else "indicator"}"'
        for c in found.columns
        if c.missing and c.role in ("number", "date", "category")
    ]
    if release:
        lacking = [c.name for c in found.columns if c.missing and c.role in ("label", "user")]
        more = [f"# Take records without {name} out of the files first." for name in lacking]
        rules.append('"*" = 0.0')
        return [*more, f"missing = {{ {', '.join(rules)} }}  # missing values are features, or 0"]
    rules.append('"*" = "drop"')
    return [
        "# Missing values become features of their own, which reads nothing off the records;",
        "# records that lack anything else are left out: how many they are is outside epsilon.",
        f"missing = {{ {', '.join(rules)} }}",
    ]


def _columns(found: Look) -> int:
    """How many features the columns become: one per number, one per value of a category, and one
    for missing values."""
    each = (
        len(column.values) if column.role == "category" else 1
        for column in found.columns
        if column.role in ("number", "date", "category")
    )
    missing = sum(column.missing for column in found.columns if column.role != "label")
    return max(1, sum(each) + missing)


def _public_norm(found: Look) -> float:
    """The norm that rows are cut to where numbers lie in −1 to 1: a category adds 1 to its square,
    a number a third on average, as if all were equally likely."""
    coded, numbers = len(found.of("category")), len(found.of("number")) + len(found.of("date"))
    return float(f"{min(MOST_NORM, max(0.5, coded + numbers / 3) ** 0.5):.3g}")


def _public_steps(norm: float) -> list[str]:
    """Steps for arrays, whose columns have no names: with blanks for public statistics."""
    return [
        "# One number for all features, or a list with one each.",
        "preprocess = [",
        f'  {{ step = "standardise", fit = "public", mean = "{BLANK}", deviation = "{BLANK}" }},',
        f'  "clip-norm:{norm:g}",',
        "]",
    ]
