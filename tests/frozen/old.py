"""Makes ``.venv-old``, an environment that holds the package of one commit, built from git.

``python tests/frozen/old.py`` is quick and may be run again and again. Nothing is downloaded: the
dependencies are those of the interpreter that runs this file.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

COMMIT, VERSION = "566b2a27f61d6c283e1bf5cd2f8fed077bfecb9a", "0.2.0"
TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
FOLDER = ROOT / ".venv-old"
PYTHON = FOLDER / "bin" / "python"

ASK = "import dpscaffold; print(dpscaffold.__version__, dpscaffold.__file__)"


class NotThere(RuntimeError):
    """The old package cannot be had here; the message is one sentence that says why."""


def environment() -> dict[str, str]:
    """The variables under which the old interpreter finds the old package and no other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    kept["PYTHONPATH"] = str(TESTS)
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept


def is_ready() -> bool:
    """Whether the environment is there, and its package is the old one."""
    if not PYTHON.exists():
        return False
    asked = subprocess.run(
        [PYTHON, "-c", ASK], capture_output=True, text=True, env=environment(), cwd=TESTS
    )
    version, _, file = asked.stdout.strip().partition(" ")
    return version == VERSION and Path(file).is_relative_to(FOLDER)


def source() -> bytes:
    """The tree of the commit as a tar file."""
    found = subprocess.run(["git", "archive", COMMIT], capture_output=True, cwd=ROOT)
    if found.returncode:
        raise NotThere(
            f"commit {COMMIT[:8]} (version {VERSION}) is not in this clone, so the old package "
            f"cannot be built; fetch the whole history (git fetch --unshallow)"
        )
    return found.stdout


def make() -> Path:
    """The old interpreter, in an environment made where there is none."""
    if is_ready():
        return PYTHON
    archive = source()
    venv.create(FOLDER, with_pip=False, clear=True, symlinks=True)
    names = {"base": str(FOLDER), "platbase": str(FOLDER)}
    packages = Path(sysconfig.get_path("purelib", vars=names))
    with tempfile.TemporaryDirectory() as scratch:
        tree, wheels = Path(scratch, "tree"), Path(scratch, "wheels")
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(tree, filter="data")
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--no-build-isolation", "--no-index"]
        built = subprocess.run([*command, "-w", wheels, tree], capture_output=True, text=True)
        if built.returncode:
            raise NotThere(f"the old package could not be built: {built.stderr.strip()[-300:]}")
        # A wheel without dependencies is unpacked by hand: pip would see the newer version too.
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(packages)
    # A path in a .pth file comes after the folder that holds it, so the old package is found first.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if not is_ready():
        raise NotThere(f"{FOLDER} was made and does not find version {VERSION}; delete it")
    return PYTHON


if __name__ == "__main__":
    try:
        print(make())
    except NotThere as error:
        sys.exit(str(error))
