"""The journal: what a crash, a full disk, a second process or a forger can do to it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.runs.journal import START, Anchor, Journal

WORDS = st.dictionaries(
    st.text(min_size=1, max_size=5).filter(lambda key: key not in ("process", "chain")),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        # unpaired surrogates are no text
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    ),
    max_size=4,
)


def filled(path, count: int = 4) -> Journal:
    journal = Journal(path)
    for round in range(1, count + 1):
        journal.append({"round": round, "users": [0, round]})
    return journal


def rounds(path) -> list[int]:
    return [line["round"] for line in Journal(path).lines()]


@settings(max_examples=30, deadline=None)
@given(st.lists(WORDS, max_size=5))
def test_what_was_appended_is_read(tmp_path_factory, lines):
    """Any JSON objects, in order, by the writer and by whoever opens the file later."""
    path = tmp_path_factory.mktemp("journal") / "lines.jsonl"
    journal = Journal(path)
    for line in lines:
        journal.append(line)
    again = Journal(path)
    assert list(again.lines()) == list(journal.lines()) == lines
    assert again.anchor == journal.anchor == Anchor(len(lines), again.head)


def test_the_chain_is_what_the_format_says(tmp_path):
    """h_k = SHA-256(h_{k−1} ‖ line_k), recomputed here from the file alone."""
    journal = filled(tmp_path / "j")
    head = START
    for raw in (tmp_path / "j").read_text().splitlines():
        line = json.loads(raw)
        chain = line.pop("chain")
        text = f"{head}\n{json.dumps(line, sort_keys=True)}"
        head = hashlib.sha256(text.encode()).hexdigest()
        assert chain == head
    assert head == journal.head


def test_cut_at_any_byte_it_reads_what_is_whole_and_goes_on(tmp_path):
    """A torn last line is no line, bricks nothing, and is gone once the next is written."""
    path = tmp_path / "j"
    filled(path)
    whole = path.read_bytes()
    ends = [place for place, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        zeros = 200 * (size in [0, *(end + 1 for end in ends)])  # as after a power cut
        path.write_bytes(whole[:size] + bytes(zeros))
        kept = sum(end <= size for end in ends)  # a line counts without its line feed too
        assert rounds(path) == list(range(1, kept + 1)), size
        Journal(path).append({"round": 9})
        assert rounds(path) == [*range(1, kept + 1), 9], size


def test_any_changed_byte_is_refused_with_its_line(tmp_path):
    """Also in the last line, which a crash may cut but not change."""
    path = tmp_path / "j"
    filled(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with refuses("ledger-damaged"):
            Journal(path)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_line_taken_out_is_refused(tmp_path, gone):
    path = tmp_path / "j"
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    with refuses(f"ledger-damaged: line {gone + 1}"):
        Journal(path)


def test_an_anchor_tells_a_shortened_or_rewritten_journal(tmp_path):
    """Later lines are fine; fewer, or others with a chain of their own, are not."""
    journal = filled(tmp_path / "j")
    then = journal.anchor
    journal.append({"round": 5})
    assert journal.follows(then) and Journal(tmp_path / "j").follows(then)
    assert not filled(tmp_path / "short", 3).follows(then)
    assert not filled(tmp_path / "other", 5).follows(then)  # another process wrote it
    assert not journal.follows(Anchor(-1, journal.head))


def test_a_short_write_is_noticed_and_cut_back(tmp_path, monkeypatch):
    """A full disk may take a part of a line without an error."""
    journal = filled(tmp_path / "j")
    before, write = (tmp_path / "j").read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda d, raw: write(d, raw[: len(raw) // 2]))
    with pytest.raises(OSError, match=r"\d+ of \d+ bytes were written") as caught:
        journal.append({"round": 5})
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert (tmp_path / "j").read_bytes() == before and len(journal) == 4
    journal.append({"round": 5})
    assert rounds(tmp_path / "j") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_an_error_while_writing_leaves_no_line(tmp_path, monkeypatch, call):
    journal = filled(tmp_path / "j")
    before = (tmp_path / "j").read_bytes()

    def fails(*arguments):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="input/output"):
        journal.append({"round": 5})
    monkeypatch.undo()
    assert (tmp_path / "j").read_bytes() == before
    journal.append({"round": 6})
    assert rounds(tmp_path / "j") == [1, 2, 3, 4, 6]


def test_a_line_is_on_the_disk_before_append_returns(tmp_path, monkeypatch):
    """The file is synced after its last byte, the folder when the file is new."""
    synced, sync = [], os.fsync

    def watch(descriptor):
        there = os.fstat(descriptor)
        synced.append((there.st_ino, there.st_size))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    journal = Journal(tmp_path / "j")
    journal.append({"round": 1})
    file, folder = (tmp_path / "j").stat(), tmp_path.stat()
    assert synced[0] == (file.st_ino, file.st_size) and synced[1][0] == folder.st_ino
    journal.append({"round": 2})
    file = (tmp_path / "j").stat()
    assert synced[2:] == [(file.st_ino, file.st_size)]


def test_two_writers_are_noticed(tmp_path):
    """By the file's size while they write, by their names afterwards."""
    one = filled(tmp_path / "j")
    two = Journal(tmp_path / "j")
    two.append({"round": 5})
    with refuses("folder-in-use"):
        one.append({"round": 5})
    third = Journal(tmp_path / "j")
    third._process = one._process
    third.append({"round": 6})
    with refuses("ledger-damaged: line 6"):
        Journal(tmp_path / "j")


def test_it_needs_no_torch():
    """A site's ledger and the privacy command open it; both must start at once."""
    code = "import dpscaffold.runs.ledger, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
