"""Logs, health checks and the status page."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser

import numpy as np
import pytest
from deploy.test_deployed import FIXED, SECRET, Killed, deployment
from deploy.world import World, new_site
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.deployment.observe import logs
from dpscaffold.deployment.observe.endpoint import TEXT, serve_pages
from dpscaffold.deployment.observe.logs import rotating_log
from dpscaffold.deployment.observe.page import server_pages, status_page
from dpscaffold.deployment.observe.status import (
    ServerStatus,
    SiteRow,
    read_server_status,
    read_site_status,
    server_lines,
)

STATUS = ServerStatus(
    "ab12", "running", 3, 10, 65.0, 2.5, 1_200_000, 900, "",
    (
        SiteRow("east", 3, "answered", True),
        SiteRow("north", 2, "policy-noise", True),
        SiteRow("south", 1, "no-answer", False),
    ),
    {"policy-noise": 1.0}, 0.12345,
)  # fmt: skip


def said(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start(server):
    """Answer from a thread of its own."""
    threading.Thread(target=server.serve_forever, daemon=True).start()


def fetch(address, path, method="GET"):
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


# --- logs


def test_a_log_has_levels_and_is_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LARGEST", 500)
    write = rotating_log(tmp_path / "site.log")
    for number in range(40):
        write(f"refused: policy-noise {number}" if number % 2 else f"online {number}")
    write("error: Traceback\n  File x\nValueError: y")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + logs.KEPT and all(path.stat().st_size <= 600 for path in files)
    lines = [json.loads(line) for line in (tmp_path / "site.log").read_text().splitlines()]
    assert lines[-1]["level"] == "error" and lines[-1]["message"].endswith("ValueError: y")
    assert {line["level"] for line in lines[:-1]} <= {"info", "warning"}
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    write = rotating_log(tmp_path / "missing" / "site.log")
    write("online")
    assert not (tmp_path / "missing").exists()


# --- the server


def test_the_table_tells_reachable_from_running():
    lines = server_lines(STATUS)
    assert lines[0] == "run ab12: running, round 3 of 10"
    assert [line.split(maxsplit=2)[2] for line in lines[2:]] == [
        "answered", "reachable, but policy-noise", "not reachable (no-answer)"]  # fmt: skip


def test_a_run_says_who_is_reachable_and_what_is_spent(tmp_path):
    world = World(tmp_path / "sites", "scaffold", privacy=FIXED, rounds=2, user_ratio=1.0)
    served = deployment(world, tmp_path / "run")
    served.reachable = lambda: {"east", "north"}
    served.run(world.names, resume=False)
    status = read_server_status(tmp_path / "run")
    assert {site.name: site.reachable for site in status.sites} == {
        "east": True, "north": True, "south": False}  # fmt: skip
    assert (status.round, status.phase) == (2, "completed") and status.age < 60
    assert "completed, round 2 of 2" in said("server", "status", tmp_path / "run").output


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_shows_the_run_and_loads_nothing():
    page = Tags(status_page(STATUS))
    assert not [tag for tag, _ in page.found if tag in ("script", "link", "img", "iframe")]
    assert not [a for _, a in page.found if {"src", "href", "onload", "action"} & set(a)]
    for text in ("running: round 3 of 10", "reachable, but policy-noise", "0.124", "1.2 MB / 0.9"):
        assert any(text in found for found in page.texts), text


def test_a_hostile_text_stays_a_text():
    row = SiteRow("<script>x</script>", 1, "<b>&", True)
    page = Tags(status_page(ServerStatus("<i>", "<u>", 1, 2, sites=(row,), refusals={"<a>": 1})))
    assert not {"script", "b", "i", "u", "a"} & {tag for tag, _ in page.found}


def test_pages_are_served_on_loopback_only(tmp_path):
    (tmp_path / "status.json").write_text(json.dumps({
        "run": "ab", "phase": "running", "round": 1, "rounds": 2, "sites": {}}))  # fmt: skip
    address = free_address()
    server = serve_pages("--page", address, server_pages(tmp_path))
    start(server)
    try:
        code, text, headers = fetch(address, "/")
        assert code == 200 and "round 1 of 2" in text
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert fetch(address, "/healthz")[:2] == (200, "ok\n")
        assert json.loads(fetch(address, "/status.json")[1])["rounds"] == 2
        assert fetch(address, "/../etc/passwd")[:2] == (404, "")
        assert fetch(address, "/", "POST")[0] == 501
        named = urllib.request.Request(f"http://{address}/", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(named, timeout=10)
        (tmp_path / "status.json").write_text("{")
        assert fetch(address, "/healthz")[:2] == (503, "not available\n")
        with refuses("address-taken: --page"):
            serve_pages("--page", address, {"/": (TEXT, str)})
    finally:
        server.shutdown()
        server.server_close()
    for wrong, code in (("0.0.0.0:8080", "not-loopback: --page is"), ("8080", "bad-address")):
        with refuses(code):
            serve_pages("--page", wrong, server_pages(tmp_path))


def test_a_run_whose_server_was_killed_is_stopped(tmp_path):
    world, out = World(tmp_path / "sites", "scaffold", privacy=SECRET, rounds=4), tmp_path / "run"
    seen = []

    def watch(number, row):
        status = read_server_status(out)
        seen.append((status.phase, status.epsilon))
        if number == 3:
            raise Killed

    with pytest.raises(Killed):
        deployment(world, out, observer=watch).run(world.names, False)
    assert {phase for phase, _ in seen} == {"running"}
    spent = [epsilon for _, epsilon in seen]
    assert all(epsilon is not None for epsilon in spent) and spent == sorted(spent) and spent[0] > 0
    assert "stopped, server run --resume" in server_lines(read_server_status(out))[0]


def test_a_damaged_status_is_one_sentence(tmp_path):
    for text in ("{", "[]", '{"run": 1}'):
        (tmp_path / "status.json").write_text(text)
        with refuses("run-damaged"):
            raise said("server", "status", tmp_path).exception


# --- a site


@pytest.fixture
def site(tmp_path):
    path = new_site(tmp_path, 'source = "npz"\npath = "data.npz"', {"epsilon": "9.0"})
    np.savez(path.parent / "data.npz", features=np.zeros((50, 3)), labels=np.zeros(50, int))
    return path


def test_a_site_shows_its_epsilon_and_its_refusals(site):
    state = site.parent / "state"
    state.mkdir()
    (state / "status.json").write_text(json.dumps({
        "last_message": "now", "answered": 4, "refusals": {"paused": 2}, "last_seconds": 0.5,
    }))  # fmt: skip
    status = read_site_status(site)
    assert (status.answered, status.epsilon_left, status.online) == (4, 9.0, False)
    assert status.refusals == {"paused": 2.0}
    shown = said("site", "status", site)
    assert "not running" in shown.output and "9.0 left" in shown.output, shown.exception


def test_a_strangers_name_for_this_machine_is_refused():
    """A web page elsewhere may have a name that leads to 127.0.0.1 (DNS rebinding)."""
    address = free_address()
    server = serve_pages("--page", address, {"/": (TEXT, lambda: "status")})
    start(server)
    try:
        for host, status in ((address, 200), ("localhost", 200), ("evil.example:80", 403)):
            request = urllib.request.Request(f"http://{address}/", headers={"Host": host})
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    found = answer.status
            except urllib.error.HTTPError as error:
                found = error.code
            assert found == status, host
    finally:
        server.shutdown()
        server.server_close()
