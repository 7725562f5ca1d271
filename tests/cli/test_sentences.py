"""What is wrong with a configuration: the key as people write it, its value, and what would do."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from dpscaffold.cli import _sentence
from dpscaffold.config.reading import parse
from dpscaffold.config.task import own_module
from dpscaffold.errors import BadInput

TABLE = {"source": "csv", "path": "a.csv", "label": "ill", "users": 2}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"data": {"source": "csv", "path": "a.csv"}},
            "data.label is missing; give it (The ",
        ),
        ({"data": {"source": "npz"}}, "data.path is missing; give it (The .npz file"),
        ({"data": 3}, "data is 3; write a table: [data]"),
        ({"privacy": {"clip": "a"}}, "privacy.clip is 'a'; give a number"),
        ({"plan": {"rounds": "ten"}}, "plan.rounds is 'ten'; give a whole number"),
        ({"privacy": {"secret": "ja"}}, "privacy.secret is 'ja'; give true or false"),
        (
            {"plan": {"weighting": "record"}},
            "plan.weighting is 'record' (did you mean 'records'?); give 'uniform', 'records' or "
            "'noise'",
        ),
        (
            {"data": {**TABLE, "missing": "mean"}},
            "data.missing is 'mean'; give 'refuse' or 'drop', a number or a table, such as "
            '{ "*" = "indicator" }',
        ),
    ],
)
def test_a_key_is_named_as_it_is_written(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse(tables)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("import sys\nsys.exit(3)\n", "own:net", "whose import failed with SystemExit: 3"),
        ("def net():\n    raise SystemExit(3)\n", "own:net", "failed with SystemExit: 3"),
        ("def net():\n    pass\n", "own.py:net", "without '.py'"),
        ("def net():\n    pass\n", "./own.py", "without '.py'"),
    ],
)
def test_a_module_that_ends_itself_or_is_named_as_a_file_is_one_sentence(
    tmp_path: Path, text: str, name: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(BadInput) as refused:
        own_module(name, tmp_path)
    assert said in str(refused.value)


def test_a_disk_without_room_is_said_with_what_to_do() -> None:
    full = _sentence(OSError(errno.ENOSPC, "No space left on device"))
    assert full == "No space left on device; free space on the disk and run the command again"
    assert _sentence(PermissionError(errno.EACCES, "Permission denied", "runs")) == (
        "runs: Permission denied"
    )
