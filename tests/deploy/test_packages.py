"""The container file, the compose file and the systemd units, built where an engine answers."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from dpscaffold.cli import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = ("server", "site")


def engine() -> str | None:
    """A container engine that answers, or None."""
    for name in ("docker", "podman"):
        if shutil.which(name) is None:
            continue
        asked = subprocess.run([name, "info"], capture_output=True, timeout=20, check=False)
        if asked.returncode == 0:
            return name
    return None


def parses(words: list[str]) -> None:
    """The words after ``dpscaffold`` name a command and options that exist."""
    group = get_command(app)
    found = group.get_command(None, words[0]).commands[words[1]]
    known = {option for parameter in found.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.slow
def test_the_image_is_built_and_runs_alone_and_by_compose(tmp_path: Path) -> None:
    name = engine()
    if name is None:
        pytest.skip("no container engine answers ('docker info'); the files are only checked")
    bases = set(re.findall(r"^FROM (\S+)", (DEPLOY / "Containerfile").read_text(), re.MULTILINE))
    for base in bases:
        there = subprocess.run([name, "image", "inspect", base], capture_output=True, check=False)
        if (
            there.returncode
            and subprocess.run(
                [name, "pull", base], capture_output=True, check=False, timeout=600
            ).returncode
        ):
            pytest.skip(f"{name} answers, but {base} is neither here nor can it be pulled")
    built = [name, "build", "-f", "deploy/Containerfile", "-t", "dpscaffold-test", "."]
    subprocess.run(built, cwd=ROOT, check=True, timeout=1800)
    hardened = ["--read-only", "--cap-drop", "ALL", "--network", "none"]
    said = subprocess.run([name, "run", "--rm", *hardened, "dpscaffold-test", "--version"],
                          capture_output=True, text=True, check=True, timeout=120)  # fmt: skip
    assert said.stdout.startswith("dpscaffold ")
    compose = [name, "compose", "-f", "deploy/compose.yaml", "--project-directory", str(tmp_path)]
    if subprocess.run([*compose, "version"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip(f"{name} runs the image, but has no 'compose'; the compose file is only read")
    subprocess.run([*compose, "config", "--quiet"], cwd=ROOT, check=True, timeout=120)
    subprocess.run([name, "tag", "dpscaffold-test", "dpscaffold"], check=True, timeout=60)
    for who in UNITS:
        said = subprocess.run([*compose, "run", "--rm", "--no-deps", who, "--version"], cwd=ROOT,
                              capture_output=True, text=True, check=True, timeout=120)  # fmt: skip
        assert said.stdout.startswith("dpscaffold ")


def test_the_container_file_ends_as_a_user_without_rights() -> None:
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and line[0].isupper()]
    last = dict(steps)
    assert last["USER"] == "10001" and last["ENTRYPOINT"] == '["dpscaffold"]'
    assert not re.search(r"(?i)secret|password|token", "\n".join(lines))
    assert (ROOT / "constraints.txt").exists()


def test_the_compose_file_is_hardened_and_starts_commands_that_exist() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == set(UNITS)
    for service in services.values():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert service["user"] == "10001:10001"
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"environment", "env_file", "privileged"} & set(service)
        parses(service["command"])
    assert "ports" not in services["site"]  # a site needs no incoming port


@pytest.mark.parametrize("who", UNITS)
def test_the_units_are_hardened_and_start_commands_that_exist(who: str) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / f"dpscaffold-{who}.service")
    service = unit["Service"]
    assert service["User"] == "dpscaffold" and service["UMask"] == "0077"
    assert service["ProtectSystem"] == "strict" and service["CapabilityBoundingSet"] == ""
    assert service["NoNewPrivileges"] == "true" and "Environment" not in service
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/dpscaffold")
    parses(words)


@pytest.mark.parametrize("who", UNITS)
def test_systemd_accepts_the_units(who: str, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed; the unit is only checked by its keys")
    text = (DEPLOY / f"dpscaffold-{who}.service").read_text()
    copy = tmp_path / f"dpscaffold-{who}.service"
    copy.write_text(re.sub("ExecStart=\\S+", "ExecStart=/bin/true", text))
    said = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert "Unknown key" not in said.stderr and "Failed to parse" not in said.stderr, said.stderr
