"""Downloads against a local server: whole, broken off, tampered with."""

from __future__ import annotations

import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from refusals import refuses

from dpscaffold.data import download
from dpscaffold.data.sources import catalogue
from dpscaffold.data.sources.catalogue import Dataset, Published
from dpscaffold.data.sources.download import fetch

CONTENT = bytes(range(256)) * 4000  # about 1 MB
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``files``; each of ``breaks`` cuts an answer short."""

    files: ClassVar[dict[str, bytes]] = {}
    breaks: ClassVar[list[int]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        content = self.files.get(self.path.lstrip("/"))
        type(self).asked.append(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.breaks:
            content = content[: self.breaks.pop(0)]
            self.close_connection = True
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.files, Handler.breaks, Handler.asked = {"file": CONTENT}, [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()
        thread.join()


def test_a_whole_transfer_with_progress(server: str, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = fetch(
        server + "file", tmp_path / "file", len(CONTENT), MD5, lambda *now: seen.append(now)
    )
    assert path.read_bytes() == CONTENT and [p.name for p in tmp_path.iterdir()] == ["file"]
    assert seen[-1] == ("file", len(CONTENT), len(CONTENT)) and len(seen) > 2


def test_a_file_that_is_there_is_not_fetched_again(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    fetch(server + "file", tmp_path / "file", len(CONTENT), MD5)
    assert Handler.asked == []
    (tmp_path / "file").write_bytes(CONTENT[:-1] + b"?")
    fetch(server + "file", tmp_path / "file", len(CONTENT), MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_broken_transfer_starts_again(server: str, tmp_path: Path) -> None:
    Handler.breaks = [300_000, 400_000]
    fetch(server + "file", tmp_path / "file", len(CONTENT), MD5, pause=0)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_transfer_that_stays_broken_leaves_nothing(server: str, tmp_path: Path) -> None:
    Handler.breaks = [100_000, 100_000]
    with refuses("download-failed: 100000"):
        fetch(server + "file", tmp_path / "file", len(CONTENT), MD5, attempts=2, pause=0)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_removes_what_came(server: str, tmp_path: Path) -> None:
    with refuses(f"dataset-damaged: {MD5} … 0000"):
        fetch(server + "file", tmp_path / "file", len(CONTENT), "0" * 32)
    with refuses("dataset-damaged: have 5"):
        fetch(server + "file", tmp_path / "file", 5)
    assert list(tmp_path.iterdir()) == []


def test_absent_files_and_servers(server: str, tmp_path: Path) -> None:
    with refuses("download-failed: 404"):
        fetch(server + "nothing", tmp_path / "file")
    with refuses("download-failed"):
        fetch("http://127.0.0.1:1/file", tmp_path / "file", attempts=1)
    with refuses("bad-address"):
        fetch("no address", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, server: str) -> str:
    """A dataset of two files on the local server."""
    Handler.files = {"a.gz": b"first", "b.gz": b"second"}
    files = tuple(
        Published(n, len(c), hashlib.md5(c).hexdigest()) for n, c in Handler.files.items()
    )
    monkeypatch.setitem(
        catalogue.CATALOGUE,
        "small",
        Dataset("small", "two files", files, (server + "gone/", server)),
    )
    return server


def test_a_dataset_comes_from_the_first_place_that_has_it(small: str, tmp_path: Path) -> None:
    paths = download("small", tmp_path)
    assert [(p.name, p.read_bytes()) for p in paths] == [("a.gz", b"first"), ("b.gz", b"second")]
    assert paths[0].parent == tmp_path / "small"


def test_a_mirror_is_held_to_the_checksums(small: str, tmp_path: Path) -> None:
    Handler.files = {"mirror/a.gz": b"FIRST", "mirror/b.gz": b"second"}
    with refuses("dataset-damaged"):
        download("small", tmp_path, mirror=small + "mirror")
    assert not (tmp_path / "small" / "a.gz").exists()


def test_unknown_and_unpublished_datasets(tmp_path: Path) -> None:
    with refuses("unknown-dataset: 'minst' … 'mnist'"):
        download("minst", tmp_path)
    with refuses("not-downloadable"):
        download("emnist47", tmp_path)
    (tmp_path / "in the way").write_text("")
    with refuses("cannot-write"):
        download("mnist", tmp_path / "in the way")


def test_archives_are_unpacked_beside_themselves(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("gzip/x-images.gz", b"images")
        archive.writestr("../../escape.gz", b"caught")
        archive.writestr("gzip/readme.txt", b"no data")
    content = packed.getvalue()
    Handler.files = {"all.zip": content}
    entry = Dataset("packed", "", (Published("all.zip", len(content)),), (server,), unpack=True)
    monkeypatch.setitem(catalogue.CATALOGUE, "packed", entry)
    paths = download("packed", tmp_path / "data")
    assert [p.name for p in paths] == ["escape.gz", "x-images.gz"]
    assert all(p.parent == tmp_path / "data" / "packed" for p in paths)
    assert (tmp_path / "data" / "packed" / "x-images.gz").read_bytes() == b"images"
    assert not (tmp_path / "data" / "packed" / "all.zip").exists()
    Handler.files = {}
    assert download("packed", tmp_path / "data") == paths  # nothing is asked for again


def test_a_damaged_archive(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Handler.files = {"all.zip": b"PK not a zip"}
    monkeypatch.setitem(
        catalogue.CATALOGUE,
        "packed",
        Dataset("packed", "", (Published("all.zip"),), (server,), unpack=True),
    )
    with refuses("dataset-damaged"):
        download("packed", tmp_path)
