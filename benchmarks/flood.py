"""Sites train while a stranger floods the server's public port: seconds a round and memory.

    python benchmarks/flood.py [--rounds 40] [--body 400] [--half 1500]

Real processes on loopback with TLS. The stranger has no key. While the run goes on it sends four
unsigned bodies of ``--body`` MB at a time, and keeps ``--half`` half-sent requests open: half of
them stop within their headers, half before the TLS handshake. A round before and a round during the
flood are compared, and the SuperLink's largest memory with what it had before.
"""

from __future__ import annotations

import argparse
import json
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from dpscaffold.deployment.transports import flower

#: The federation of processes is next to the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
flower.require()

from deploy_demo import (  # noqa: E402
    POLICY,
    demo_data,
    demo_tables,
    site_data,
)
from local_federation import LocalFederation  # noqa: E402


def resident(process) -> float:
    """MB of memory that a process has."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


class Flood:
    """The stranger: ``sent`` MB that it could write, ``held`` connections that are open."""

    def __init__(self, port: int, body: int, half: int) -> None:
        self.port, self.body, self.half = port, body, half
        self.stop = threading.Event()
        self.sent, self.opened = 0.0, 0
        self.held: list[socket.socket] = []
        self.context = ssl.create_default_context()
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE

    def connect(self, tls: bool = True) -> socket.socket:
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        return self.context.wrap_socket(raw) if tls else raw

    def bodies(self) -> None:
        head = (
            f"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: {self.body << 20}"
        )
        while not self.stop.is_set():
            try:
                with self.connect() as one:
                    one.sendall(head.encode() + b"\r\n\r\n")
                    for _ in range(self.body):
                        one.sendall(bytes(1 << 20))
                        self.sent += 1
            except OSError:
                time.sleep(0.05)

    def halves(self) -> None:
        while not self.stop.is_set():
            if len(self.held) >= self.half:
                self.held = [one for one in self.held if self._is_open(one)]
                time.sleep(0.2)
                continue
            try:
                one = self.connect(tls=len(self.held) % 2 == 0)
                if len(self.held) % 2 == 0:
                    one.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: ")
                self.held.append(one)
                self.opened += 1
            except OSError:
                self.held = [one for one in self.held if self._is_open(one)]
                time.sleep(0.05)

    @staticmethod
    def _is_open(one: socket.socket) -> bool:
        try:
            one.setblocking(False)
            return one.recv(1) != b""
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False

    def start(self) -> None:
        for work in (*[self.bodies] * 4, self.halves):
            threading.Thread(target=work, daemon=True).start()


def rounds_of(out: Path) -> int:
    """Rounds that are done."""
    path = out / "status.json"
    return json.loads(path.read_text())["round"] if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("rounds", 40), ("body", 400), ("half", 1500)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    policy = dict(POLICY) | {"epsilon": "5000.0"}
    with LocalFederation(folder / "fed", site_data(demo_data(200)), policy) as local:
        local.start()
        tables, out = demo_tables(given.rounds), folder / "run"
        local.start_server(local.config("plan", tables), out)
        flood, times, most = Flood(local.public, given.body, given.half), [], 0.0
        seen, when, before = 0, time.monotonic(), 0.0
        while local.processes["server"].poll() is None:
            most = max(most, resident(local.processes["link"]))
            done = rounds_of(out)
            if done > seen:
                times.append(((time.monotonic() - when) / (done - seen), seen))
                seen, when = done, time.monotonic()
                if seen >= given.rounds // 2 and not before:
                    before, most = most, 0.0
                    flood.start()
            time.sleep(0.05)
        flood.stop.set()
        quiet = statistics.median(s for s, n in times[1:] if n < given.rounds // 2)
        loud = statistics.median(s for s, n in times if n >= given.rounds // 2)
        log = len(local.log("link"))
        print(f"exit status {local.processes['server'].returncode}, {seen} rounds")
        print(f"seconds a round: {quiet:.2f} before the flood, {loud:.2f} during it")
        print(f"SuperLink: {before:.0f} MB before, at most {most:.0f} MB during the flood")
        print(f"the stranger wrote {flood.sent:.0f} MB and opened {flood.opened} half requests, ")
        print(f"{len(flood.held)} of them open at the end; the SuperLink's log has {log} bytes")


if __name__ == "__main__":
    main()
