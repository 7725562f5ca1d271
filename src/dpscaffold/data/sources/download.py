"""Fetch published files: progress, checksums, and nothing half-written under a final name.

A transfer goes to ``NAME.part``; when all of it is there and its checksum is right it is renamed to
NAME.
"""

from __future__ import annotations

import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

from dpscaffold.atomic import sync_file, sync_folder, write_text
from dpscaffold.data.sources.catalogue import Dataset, Published, data_folder, dataset, md5_of
from dpscaffold.errors import BadInput

#: Called with (file name, bytes so far, bytes in all or None).
Progress = Callable[[str, int, int | None], None]
_CHUNK = 1 << 18
_TIMEOUT = 30.0


def download(
    name: str,
    data_dir: str | Path | None = None,
    mirror: str | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Fetch all files of a dataset into ``<data folder>/<name>`` and return their paths.

    Files that are there already, with the right size and checksum, are not fetched again.
    ``mirror`` is a place to fetch from instead of the published ones; checksums hold for it too.
    """
    entry = dataset(name)
    places = (mirror.rstrip("/") + "/",) if mirror else entry.places
    if not places:
        raise BadInput(
            "not-downloadable",
            f"{name} is not published anywhere for download; put its files into "
            f"{data_folder(data_dir) / name}",
        )
    folder = data_folder(data_dir) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(
            "cannot-write",
            f"{folder} cannot be made: {problem.strerror}; choose another folder with --data-dir",
        ) from None
    if entry.unpack and _is_unpacked(folder, entry):
        return sorted(folder.glob("*.gz"))
    paths = [_from_places(places, file, folder, progress) for file in entry.files]
    return unpack(paths[0]) if entry.unpack else paths


def _is_unpacked(folder: Path, entry: Dataset) -> bool:
    """Whether an earlier call finished: the marker is written after the last member."""
    return (folder / f"{entry.files[0].name}.unpacked").is_file()


def _from_places(
    places: tuple[str, ...], file: Published, folder: Path, progress: Progress | None
) -> Path:
    """Try one place after the other; the last one's failure is reported."""
    for place in places[:-1]:
        try:
            return fetch(place + file.name, folder / file.name, file.size, file.md5, progress)
        except BadInput:
            continue
    return fetch(places[-1] + file.name, folder / file.name, file.size, file.md5, progress)


def fetch(
    url: str,
    target: str | Path,
    size: int | None = None,
    md5: str | None = None,
    progress: Progress | None = None,
    attempts: int = 3,
    pause: float = 1.0,
) -> Path:
    """Fetch one URL to ``target`` and compare size and checksum.

    A transfer that breaks off starts again, up to ``attempts`` times, waiting ``pause`` seconds in
    between. A file with the wrong size or checksum is removed.
    """
    target = Path(target)
    if target.is_file() and _defect(target, size, md5) is None:
        return target
    part = target.with_name(target.name + ".part")
    try:
        _transfer_with_retries(url, part, progress, target.name, attempts, pause)
        defect = _defect(part, size, md5)
        if defect is not None:
            raise BadInput(
                "dataset-damaged",
                f"what came from {url} {defect}; it was removed, try again or use another --mirror",
            )
        _named(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _transfer_with_retries(
    url: str, part: Path, progress: Progress | None, name: str, attempts: int, pause: float
) -> None:
    for attempt in range(1, attempts + 1):
        try:
            _transfer(url, part, progress, name)
            return
        except urllib.error.HTTPError as problem:
            raise BadInput(
                "download-failed",
                f"{url} cannot be fetched: the server answers {problem.code} {problem.reason}",
            ) from None
        except ValueError:
            raise BadInput("bad-address", f"{url} is not an address that can be fetched") from None
        except (OSError, http.client.HTTPException) as problem:
            if attempt == attempts:
                reason = getattr(problem, "reason", None) or problem
                raise BadInput(
                    "download-failed", f"{url} cannot be fetched ({reason}); try again later"
                ) from None
            time.sleep(pause)


def _transfer(url: str, part: Path, progress: Progress | None, name: str) -> None:
    """Write all of a URL to ``part``; raises OSError or HTTPException when it breaks off."""
    request = urllib.request.Request(
        url, headers={"User-Agent": "dpscaffold", "Accept-Encoding": "identity"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer, open(part, "wb") as file:
        length = answer.headers.get("Content-Length")
        total = None if length is None else int(length)
        have = 0
        while chunk := answer.read(_CHUNK):
            file.write(chunk)
            have += len(chunk)
            if progress is not None:
                progress(name, have, total)
    if total is not None and have < total:
        raise ConnectionError(f"{have} of {total} bytes came")


def _named(part: Path, target: Path) -> None:
    """Give a finished transfer its name; a power cut leaves it whole, or not there."""
    sync_file(part)
    os.replace(part, target)
    sync_folder(target.parent)


def _defect(path: Path, size: int | None, md5: str | None) -> str | None:
    """What is wrong with a file, as the end of a sentence, or None."""
    if size is not None and path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes and should have {size}"
    if md5 is not None and (found := md5_of(path)) != md5:
        return f"has the MD5 {found} and should have {md5}"
    return None


def unpack(archive: Path) -> list[Path]:
    """Put the ``.gz`` members of a zip archive next to it, whole or not at all, and remove the
    archive.

    Only the last part of a member's name is used, so that an archive cannot write elsewhere.
    """
    paths = []
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                if member.is_dir() or not member.filename.endswith(".gz"):
                    continue
                path = archive.parent / Path(member.filename).name
                part = path.with_name(path.name + ".part")
                with packed.open(member) as source, open(part, "wb") as out:
                    shutil.copyfileobj(source, out, _CHUNK)
                _named(part, path)
                paths.append(path)
    except (zipfile.BadZipFile, EOFError, OSError) as problem:
        raise BadInput(
            "dataset-damaged",
            f"{archive} cannot be unpacked ({problem}); remove it and fetch it again",
        ) from None
    write_text(archive.with_name(archive.name + ".unpacked"), "\n".join(p.name for p in paths))
    archive.unlink()
    return sorted(paths)
