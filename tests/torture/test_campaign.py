"""A small part of the fault campaign (``make torture`` runs all of it)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from world import BROKEN, EXPORT_FORMATS, app

CAMPAIGN = Path(__file__).parent / "campaign.py"


def played(*options, path=""):
    """The campaign in a process of its own, which forks."""
    where = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        [sys.executable, str(CAMPAIGN), "--seed", "7", "--minutes", "3", *options],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": where},
    )


def play(*options):
    answer = played(*options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_a_few_kills_and_damages():
    """Training, seeded and secret, killed at random moments, and a bit flipped in every file."""
    counts = ("--kills", "2", "--disks", "0", "--damages", "3", "--endings", "1")
    said = play("--only", "train.,train secret.", *counts)
    assert said.count("killed: ") == said.count("killed thrice: ") == 2
    assert " 0 losses" in said


@pytest.mark.slow
def test_a_kill_and_a_power_cut_between_file_operations():
    """Some points of a run and of commands that replace files; ``slow`` takes every one."""
    said = play("--grid", "29", "--only", "train.,report.,site init")
    assert " 0 losses" in said and "power cut at point 30" in said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train.", "train secret", "train reserved"])
def test_every_point_between_the_file_operations_of_a_run(command):
    said = play("--grid", "1", "--minutes", "12", "--only", command)
    assert " 0 losses" in said and "to go" not in said


@pytest.mark.slow
def test_every_command_that_writes_at_some_points():
    said = play("--grid", "5", "--minutes", "12")
    assert " 0 losses" in said and "to go" not in said


def leaves(command, path=()):
    """Every command that can be given, by its words."""
    context = click.Context(command)
    if not isinstance(command, click.Group):
        return {path: command}
    inner = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {p: c for name, one in inner.items() for p, c in leaves(one, (*path, name)).items()}


#: Options that name a file or a folder which is only read.
READ = {"--data-dir", "--config", "--server", "--offer"}


def test_every_command_that_writes_is_killed(monkeypatch):
    """Each command of the command line, and each option of it that names what to write, is in the
    campaign's list, or is excused with a reason. No option of the list is out of date (a command
    that is refused writes nothing, so its kills would show nothing), and no excuse."""
    monkeypatch.syspath_prepend(CAMPAIGN.parent)
    from commands import EXCUSED, all_works

    typed = [words for work in all_works() for words in (work.arguments, work.again) if words]
    commands = leaves(typer.main.get_command(app))
    for path, command in commands.items():
        mine = [words[len(path) :] for words in typed if tuple(words[: len(path)]) == path]
        given = {word for words in mine for word in words if word.startswith("-")}
        options = [option for option in command.params if isinstance(option, click.Option)]
        known = {name for one in options for name in (*one.opts, *one.secondary_opts)}
        assert given <= known, (path, given - known)
        files = {one.opts[0] for one in options if "path" in one.type.name} - READ
        assert bool(mine) != (" ".join(path) in EXCUSED), path
        assert not mine or files <= given, (path, files - given)
    assert {tuple(name.split()) for name in EXCUSED} <= set(commands)
    formats = {words[words.index("--to") + 1] for words in typed if words[0] == "export"}
    assert formats == set(EXPORT_FORMATS)


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(name, marks=[pytest.mark.slow] * (k > 0)) for k, name in enumerate(BROKEN)],
)
def test_the_campaign_can_fail(tmp_path, mistake):
    """A journal with a hole, and files in a wrong order, are noticed."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN[mistake])
    answer = played("--only", "train secret.", "--grid", "13", path=tmp_path)
    assert answer.returncode != 0, answer.stdout
