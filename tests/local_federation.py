"""A federation of processes on this machine, for the demo, benchmarks and tests.

Everything is real: a SuperLink behind its gate, one process per site with keys and state of its
own, TLS and node authentication. Every process is ended when the ``with`` block is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import tomli_w

from dpscaffold.deployment.provision import FederationFile, admit, provision, read_invitation
from dpscaffold.deployment.site.begin import make_site
from dpscaffold.deployment.transports.flower import QUIET

#: Seconds until a process that was started is up, or has done its work, on a machine with
#: much other work. Nothing waits so long unless something is wrong: waiting ends with the event.
PATIENCE = 900.0
#: How a command of this package is called.
PROGRAM = (sys.executable, "-m", "dpscaffold")


class LocalFederation:
    """The folder ``folder`` holds the server's keys, one folder per site, and all logs.

    ``data`` maps names to (features, labels); ``policy`` replaces values of the sites' policies;
    ``program`` is what runs the commands, for tests and benchmarks that watch them.
    """

    def __init__(
        self,
        folder: Path,
        data: Mapping[str, tuple[np.ndarray, np.ndarray]],
        policy: Mapping[str, str],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.folder, self.names, self.program = folder, tuple(data), tuple(program)
        self.public, self.inner = free_port(), free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        address = f"127.0.0.1:{self.public}"
        invitations = provision(FederationFile(address, self.names), folder)
        for path in invitations:
            features, labels = data[path.stem]
            site = folder / path.stem
            site.mkdir()
            np.savez(site / "data.npz", features=features, labels=labels)
            table = 'source = "npz"\npath = "data.npz"'
            make_site(read_invitation(path), site, table, dict(policy))
            self._amend(site / "site.toml", len(labels))
            admit(folder / "server", site / f"{path.stem}.site")

    @staticmethod
    def _amend(path: Path, records: int) -> None:
        text = path.read_text()
        path.write_text(text.replace("\n[data]", f"records = {records}\n\n[data]", 1))

    def __enter__(self) -> LocalFederation:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # --- processes

    def start_link(self) -> None:
        """The SuperLink; returns when both its sides listen."""
        said = len(self.log("link"))
        self._start(
            "link",
            "server",
            "start",
            *("--server", str(self.folder / "server")),
            *("--public", f"127.0.0.1:{self.public}", "--inner", f"127.0.0.1:{self.inner}"),
        )
        self._await("link", "sites connect to", said)

    def start_site(self, name: str) -> None:
        """One site's process."""
        self._start(name, "site", "start", str(self.folder / name / "site.toml"))

    def start(self) -> None:
        """The SuperLink and all sites; returns when they are online."""
        self.start_link()
        for name in self.names:
            self.start_site(name)
        for name in self.names:
            self._await(name, "online")

    def config(self, name: str, tables: Mapping[str, object]) -> Path:
        """Write a server's configuration, addressed to this SuperLink."""
        deploy: dict[str, object] = {"address": f"127.0.0.1:{self.inner}"}
        given = tables.get("deploy", {})
        deploy |= dict(given) if isinstance(given, Mapping) else {}
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps({**tables, "deploy": deploy}))
        return path

    def start_server(self, config: Path, out: Path, resume: bool = False) -> None:
        """The process that drives a run."""
        more = ["--resume"] if resume else []
        server = str(self.folder / "server")
        arguments = [str(config), "--out", str(out), "--server", server, *more]
        self._start("server", "server", "run", *arguments)

    def run(self, config: Path, out: Path, resume: bool = False, seconds: float = PATIENCE) -> int:
        """A whole run; returns its exit status."""
        self.start_server(config, out, resume)
        return self.processes["server"].wait(seconds)

    def kill(self, name: str) -> None:
        """kill −9."""
        process = self.processes[name]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self, name: str, seconds: float = PATIENCE) -> int:
        """SIGTERM; returns the exit status."""
        process = self.processes[name]
        process.terminate()
        return process.wait(seconds)

    def log(self, name: str) -> str:
        """What a process has said so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End every process that was started."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + 10
        for process in self.processes.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, *arguments: str) -> None:
        environment = os.environ | QUIET | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["FLWR_HOME"] = str(self.folder / ".flwr")
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.program, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                preexec_fn=_die_with_parent,
            )

    def _await(self, name: str, word: str, after: int = 0) -> None:
        """Until a process says ``word`` in its log, beyond the first ``after`` characters."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if word in self.log(name)[after:]:
                return
            if self.processes[name].poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"{name} did not start:\n{self.log(name)[-2000:]}")


class SlowLink:
    """A link of ``bits_per_second`` each way, on loopback: what connects to ``port`` reaches
    ``target``. All connections share the rate; ``cut`` closes them."""

    def __init__(self, target: int, bits_per_second: float) -> None:
        self.target, self.rate = target, bits_per_second / 8
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.carried = [0, 0]  # bytes up and down
        self._free, self._locks = [0.0, 0.0], (threading.Lock(), threading.Lock())
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._listen, daemon=True).start()

    def carry(self, local: LocalFederation, name: str) -> None:
        """Lead a site's connections, from its next start on, over this link."""
        path = local.folder / name / "site.toml"
        path.write_text(
            path.read_text().replace(f"127.0.0.1:{local.public}", f"127.0.0.1:{self.port}")
        )

    def cut(self) -> None:
        """Close every connection."""
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()
        self.cut()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
                for way, (one, other) in enumerate(((near, far), (far, near))):
                    threading.Thread(target=self._pump, args=(way, one, other), daemon=True).start()

    def _pump(self, way: int, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 14):
                with self._locks[way]:
                    self.carried[way] += len(piece)
                    now = time.monotonic()
                    self._free[way] = max(now, self._free[way]) + len(piece) / self.rate
                    due = self._free[way]
                time.sleep(max(0.0, due - now))
                sink.sendall(piece)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            self._open.discard(one)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """Not to outlive a parent that was killed (Linux; elsewhere nothing happens)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
