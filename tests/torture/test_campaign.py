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


def test_every_option_in_the_campaign_exists(monkeypatch):
    """A command that is refused for its options writes nothing, so its kills would show nothing."""
    monkeypatch.syspath_prepend(CAMPAIGN.parent)
    from commands import all_works

    commands = leaves(typer.main.get_command(app))
    for work, _ in all_works():
        for words in filter(None, (work.arguments, work.again)):
            path = next(p for p in (tuple(words[:n]) for n in (3, 2, 1)) if p in commands)
            known = {
                o
                for option in commands[path].params
                for o in (*option.opts, *option.secondary_opts)
            }
            strange = {word for word in words if word.startswith("-")} - known
            assert not strange, (work.name, strange)


def test_every_command_that_writes_is_killed(monkeypatch):
    """Each command of the command line, and each option of it that names what to write, is in the
    campaign's list, or is excused with a reason, and no excuse is out of date."""
    monkeypatch.syspath_prepend(CAMPAIGN.parent)
    from commands import EXCUSED, all_works

    given = [work.arguments for work, _ in all_works()]
    commands = leaves(typer.main.get_command(app))
    missing = []
    for path, command in commands.items():
        mine = [set(words[len(path) :]) for words in given if tuple(words[: len(path)]) == path]
        if " ".join(path) in EXCUSED:
            assert not mine, f"{' '.join(path)} is excused and killed"
            continue
        files = [
            option.opts[0]
            for option in command.params
            if isinstance(option, click.Option) and "path" in option.type.name
        ]
        wanted = [name for name in files if name not in READ] or [""]
        killed = set().union(*mine) | ({""} if mine else set())
        missing += [(*path, name) for name in wanted if name not in killed]
    assert missing == []
    assert {tuple(name.split()) for name in EXCUSED} <= set(commands)
    formats = {words[words.index("--to") + 1] for words in given if words[0] == "export"}
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
