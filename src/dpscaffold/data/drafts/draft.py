"""A drafted configuration: TOML with a comment next to every guess.

The drafted run is gradient descent on the records of all sites together (docs/drafts.md says why):
every site takes one step on all its records in every round, and the mean is weighted by records.
So differences between sites disturb nothing, and no site's noise is louder than another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dpscaffold.data.config import BLANK
from dpscaffold.data.drafts.profile import LEAST_RECORDS, ColumnProfile, TableProfile
from dpscaffold.data.tables.cells import toml_key, toml_text, written
from dpscaffold.data.tables.dialect import AUTO, found_in
from dpscaffold.data.tables.source import listed_by_value
from dpscaffold.federation.roster import FEW_USERS
from dpscaffold.federation.schema import Kind, Target
from dpscaffold.privacy.numbers import round_up
from dpscaffold.privacy.solve import gaussian_epsilon, gaussian_multiplier

#: Rows are cut to this norm at most. A larger one leaves more of the noise to the bias and less to
#: the weights of features, and the bias is learnt more slowly.
MOST_NORM = 3.0
#: Where no column names a site, records are partitioned among this many.
MOST_RANDOM_SITES = 10
#: A site is named where its noise would be more than this share of all sites' together.
DOMINATES = 0.5


def random_sizes(records: int) -> dict[str, int]:
    """Sites of equal sizes, for records that belong to none.

    >>> random_sizes(45)
    {'0': 11, '1': 11, '2': 11, '3': 11}
    """
    count = max(1, min(MOST_RANDOM_SITES, records // LEAST_RECORDS))
    return {str(site): records // count for site in range(count)}


def standardised(norm: float) -> list[str]:
    """The preparation of a table whose numbers have no public range."""
    return [
        "# Mean and deviation are computed from the training records, outside epsilon; the docs",
        '# say how to protect them ("Preprocessing and privacy"). Long rows are scaled down.',
        f'preprocess = ["standardise", "clip-norm:{norm:g}"]',
    ]


def run_lines(
    sizes: Mapping[str, int], target: Kind, norm: float, labels: int, epsilon: float
) -> list[str]:
    """How to train on sites of these ``sizes``, whose rows have at most this ``norm``; ``labels``
    is the number of label columns."""
    ratio = 1.0 if len(sizes) <= FEW_USERS else round(FEW_USERS / len(sizes), 3)
    quiet = loud_site(sizes) or "a small site counts less, and so does its noise"
    return [
        "",
        "[task]",
        f'kind = "{"linear" if target == "number" else "logistic"}"',
        "",
        "[algorithm]",
        "# With one step per round sites do not drift apart, so nothing needs to be corrected.",
        'name = "fedavg"',
        "",
        "[plan]",
        "rounds = 100",
        "local_steps = 1",
        f"user_ratio = {ratio:g}  # the share of sites that take part in a round",
        "data_ratio = 1.0  # a step uses all records of a site",
        f'weighting = "records"  # {quiet}',
        "regularisation = 0.0",
        'averaging = "tail"  # average the last rounds: free, and better under noise',
        "",
        "[privacy]",
        "# Against the server. Participants are drawn by a seed of the operating system, unless",
        "# plan.seed is given. The seed is kept in the run folder (secret.json).",
        *_epsilon(epsilon, sum(sizes.values())),
        'sampling = "poisson"',
        f"clip = {clip_bound(target, norm, labels)}",
        "secret = true  # noise from the operating system: with a seed it could be subtracted",
    ]


def row_norm(columns: int) -> float:
    """The norm that rows are cut to: √d, which a standardised row of d features has on average,
    and at most :data:`MOST_NORM`.

    >>> row_norm(2), row_norm(30)
    (1.41, 3.0)
    """
    return float(f"{min(MOST_NORM, columns**0.5):.3g}")


def clip_bound(target: Kind, norm: float, labels: int = 1) -> str:
    """C: what few gradients exceed. A record's gradient has the norm of its row, √(N² + 1) with
    the bias, times the error of its scores: below 1 where classes are told apart well, about 0.7
    for each of several labels, and rarely above a quarter for a number in [−1, 1].

    >>> clip_bound("class", 3.0), clip_bound("labels", 3.0, labels=2), clip_bound("number", 3.0)
    ('3.2', '3.2', '0.79')
    """
    error = {"class": 1.0, "labels": (labels / 2) ** 0.5, "number": 0.25}[target]
    return f"{error * (norm**2 + 1) ** 0.5:.2g}"


def loud_site(sizes: Mapping[str, int]) -> str | None:
    """The site whose noise would drown all others' if sites counted alike, in words; None where
    there is none. A site's noise is one over its records.

    >>> loud_site({"charite": 720, "oslo": 500, "lille": 10})
    "lille has 10 records: counted like charite, its noise would be 72 times charite's"
    """
    there = {name: size for name, size in sizes.items() if size >= LEAST_RECORDS}
    if len(there) < 3:
        return None
    least, most = min(there, key=lambda s: there[s]), max(there, key=lambda s: there[s])
    if there[least] ** -2 <= DOMINATES * sum(size**-2 for size in there.values()):
        return None
    times = there[most] / there[least]
    return (
        f"{_plain(least)} has {there[least]} records: counted like {_plain(most)}, its noise would "
        f"be {times:.0f} times {_plain(most)}'s"
    )


def _plain(name: str) -> str:
    """A site's name as a comment can hold it."""
    return "".join(sign if sign.isprintable() else " " for sign in name) or "a site without a name"


def _epsilon(epsilon: float, records: int) -> list[str]:
    """ε, and what it is for replacing a record: all steps on full batches are one Gaussian, of
    twice the shift there. δ is that of a run on four fifths of the records."""
    delta, replaced = 1 / max(20, 8 * records), "more than twice as much"
    if 1e-3 <= epsilon <= 100:
        noise = gaussian_multiplier(epsilon, delta)
        replaced = f"about {round_up(gaussian_epsilon(noise / 2, delta))}"
    return [
        f"# epsilon is for removing a record's content, and {replaced} for replacing one record",
        '# by another. (With sampling = "fixed" it is for that, with twice the noise.)',
        f"epsilon = {epsilon:g}  # the noise is computed from it",
    ]


OUTSIDE = (
    "This draft was made by looking at private data. "
    "Epsilon does not cover what the draft or your edits reveal."
)
HEAD = f"""# Drafted by dpscaffold init. Check every line: these are guesses.
# {OUTSIDE}
"""


#: What a draft for a release says first.
BLANKS = f"""# For a model that you will publish. Replace every "{BLANK}" by what is known without
# looking at the records, then run dpscaffold train.
"""


def draft(found: TableProfile, epsilon: float, release: bool = False) -> str:
    """The configuration of a table that was looked at; for a ``release`` with blanks for what must
    be public."""
    norm = _public_norm(found) if release else row_norm(_columns(found))
    lines = [
        HEAD,
        *([BLANKS] if release else []),
        f"# Based on {found.rows} rows, drawn from all.",
        "[data]",
        _DRAFTED,
        f'source = "{found.kind}"',
        f"path = {toml_text(found.path.as_posix())}{_files(found)}",
        *(_public_dialect(found) if release else _dialect(found)),
        *_label(found),
        *_target(found.target, release),
        *(f"user = {toml_text(c.name)}  # site of each record: {c.why}" for c in found.of("user")),
        *_without_users(found),
        *_features(found, release),
        f"minimum_records = {LEAST_RECORDS}  # smaller sites are left out and listed",
        *([f'preprocess = ["clip-norm:{norm:g}"]'] if release else standardised(norm)),
        *run_lines(
            found.sizes if found.users else random_sizes(sum(found.sizes.values())),
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


_SPLIT = ['partition = "similarity"', "similarity = 100.0  # all users alike"]


def _files(found: TableProfile) -> str:
    if found.by_file:
        return f"  # {found.users} files, one per user"
    return "" if not found.path.is_dir() else "  # all files of the folder"


def _dialect(found: TableProfile) -> list[str]:
    if found.kind != "csv":
        return []
    dialect = found.dialect
    if AUTO in (dialect.delimiter, dialect.encoding, dialect.decimal):
        return [
            "# The files differ; 'auto' detects each.",
            'encoding = "auto"',
            'delimiter = "auto"',
            'decimal = "auto"',
        ]
    return [
        f"encoding = {toml_text(dialect.encoding)}",
        f"delimiter = {toml_text(dialect.delimiter)}",
        f"decimal = {toml_text(dialect.decimal)}",
    ]


def _public_dialect(found: TableProfile) -> list[str]:
    """How the files of a release are written: what was found where they are alike, else a blank
    and what was found, since a release guesses nothing from records."""
    if found.kind != "csv":
        return []
    lines = []
    for key in ("encoding", "delimiter", "decimal"):
        values = found_in((name, vars(dialect)[key]) for name, dialect in found.dialects)
        only, *others = values
        if others:
            lines += [
                f"# The files differ: {listed_by_value(values)}. Save them alike.",
                f'{key} = "{BLANK}"',
            ]
        else:
            lines.append(f"{key} = {toml_text(only)}")
    return lines


def _label(found: TableProfile) -> list[str]:
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
    """The other spellings of a column's values."""
    if not column.same:
        return []
    return [f"{written(column.name, column.same)}  # guessed to be one value: remove the others"]


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


def _without_users(found: TableProfile) -> list[str]:
    if found.by_file or found.of("user"):
        return []
    users = len(random_sizes(sum(found.sizes.values())))
    said = "no column names a site: records are partitioned at random; or user = COLUMN"
    return [f"users = {users}  # {said}", *_SPLIT]


def _features(found: TableProfile, release: bool) -> list[str]:
    """Which columns are what, one line each where a word is needed."""
    lines = []
    if left := found.of("left out"):
        lines.append("exclude = [")
        lines += [f"  {toml_text(c.name)},  # {c.why}" for c in left]
        lines.append("]")
    coded = found.of("category")
    if coded and release:
        lines.append("# The values of every category; any other value counts as none of them.")
        lines += [f'categories.{toml_key(c.name)} = "{BLANK}"  # such as ["a", "b"]' for c in coded]
        lines.append('unseen = "zero"')
    elif coded:
        lines.append("# Their values are read from the data, outside epsilon. Or list them:")
        lines.append(f"# categories = {{ {toml_text(coded[0].name)} = {_values(coded[0])} }}")
        lines.append(f"categories = [{', '.join(toml_text(c.name) for c in coded)}]")
    lines += [line for c in coded for line in _spellings(c)]
    if lacking := [c for c in found.columns if c.absent and c.role != "left out"]:
        listed = ", ".join(toml_text(c.name) for c in lacking)
        lines.append(f"absent = [{listed}]  # some files lack them: their values are missing there")
    if dated := found.of("date"):
        pairs = ", ".join(f"{toml_text(c.name)} = {_forms(c)}" for c in dated)
        lines.append(f"dates = {{ {pairs} }}  # days since 1970")
    measured = [c for c in found.columns if c.role in ("number", "date")]
    if measured and release:
        lines.append("# The range of every number, mapped to -1 to 1; values outside are clipped.")
        days, numbers = '["2020-01-01", "2029-12-31"]', "[0, 100]"
        lines += [
            f'ranges.{toml_key(c.name)} = "{BLANK}"  # such as {days if c.forms else numbers}'
            for c in measured
        ]
    return [*lines, *_na_values(found), *_missing(found, release)]


def _forms(column: ColumnProfile) -> str:
    listed = ", ".join(map(toml_text, column.forms))
    return listed if len(column.forms) == 1 else f"[{listed}]"


def _values(column: ColumnProfile) -> str:
    shown = [toml_text(value) for value in column.values[:4]]
    return f"[{', '.join(shown)}{', …' if len(column.values) > 4 else ''}]"


def _na_values(found: TableProfile) -> list[str]:
    """Texts that are taken for missing values, a line a column, and those that only might be."""
    lines = []
    for column in found.columns:
        if column.na_values:
            count, kind = (
                sum(column.na_values.values()),
                "dates" if column.role == "date" else "numbers",
            )
            said = f"not {kind}, in {count} of {found.rows} rows: these seem to mean missing"
            lines.append(f"{_marked(column, column.na_values)}  # {said}")
        if column.maybe:
            shown = ", ".join(f"{toml_text(text)} in {n}" for text, n in column.maybe.items())
            instead = ", instead of the line above" if column.na_values else ""
            lines += [
                f"# {toml_text(column.name)} has {shown} of {found.rows} rows, read as a value:",
                f"# you decide. If it means missing{instead}:",
                f"# {_marked(column, {**column.na_values, **column.maybe})}",
            ]
    return lines


def _marked(column: ColumnProfile, texts: Iterable[str]) -> str:
    return f"na_values.{toml_text(column.name)} = [{', '.join(map(toml_text, texts))}]"


def _missing(found: TableProfile, release: bool) -> list[str]:
    """Rules that read nothing from the records: an indicator next to a zero, a further category. In
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
        "# Missing values become features of their own, which reads nothing from the records.",
        "# Records that lack anything else are left out; their number is outside epsilon.",
        f"missing = {{ {', '.join(rules)} }}",
    ]


def _columns(found: TableProfile) -> int:
    """How many features the columns become: one per number, one per value of a category, and one
    for missing values."""
    each = (
        len(column.values) if column.role == "category" else 1
        for column in found.columns
        if column.role in ("number", "date", "category")
    )
    missing = sum(column.missing for column in found.columns if column.role != "label")
    return max(1, sum(each) + missing)


def _public_norm(found: TableProfile) -> float:
    """The norm that rows are cut to where numbers lie in −1 to 1: a category adds 1 to its square,
    a number a third on average, as if all were equally likely."""
    coded, numbers = len(found.of("category")), len(found.of("number")) + len(found.of("date"))
    return float(f"{min(MOST_NORM, max(0.5, coded + numbers / 3) ** 0.5):.3g}")
