"""The SuperLink behind a gate: Flower's own application in our process, with two listeners.

The public listener answers ``/v1/fleet/*``, where requests are signed by node keys, and nothing
else: Flower's open build lets anybody who reaches its other paths submit an application or claim a
task. The loopback listener answers everything, for the process that drives a run. State is in
memory: what is worth keeping is in run folders and at the sites.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.main import create_app

from dpscaffold.deployment.provision import check_certificate, is_loopback, read_secret
from dpscaffold.engines.machine import give_memory_back
from dpscaffold.errors import BadInput

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class FleetOnly:
    """Lets sites' requests through and answers everything else as if it were not there."""

    def __init__(self, app: _App) -> None:
        self.app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            return
        if scope["type"] == "http" and self._is_fleet(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            start = {"type": "http.response.start", "status": 404}
            await send(start | {"headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1000})

    @staticmethod
    def _is_fleet(scope: _Scope) -> bool:
        """One plain segment after the prefix, exactly as it was sent: no dots, no escapes."""
        path, raw = str(scope["path"]), scope.get("raw_path") or b""
        rest = path.removeprefix("/v1/fleet/")
        plain = rest.replace("-", "").isalnum() and rest.isascii()
        return rest != path and plain and raw.partition(b"?")[0] == path.encode()


@dataclass(frozen=True)
class Listeners:
    """Where the SuperLink listens: the public side and the loopback side, and whose folder holds
    its certificate and secret."""

    public: tuple[str, int]
    inner: tuple[str, int]
    folder: Path
    insecure: bool = False


def superlink_config(listeners: Listeners) -> SuperLinkLifespanConfig:
    """Flower's configuration: in-memory state, node authentication, tasks only with the secret."""
    folder, insecure = listeners.folder, listeners.insecure
    files = [folder / name for name in ("ca.crt", "server.crt", "server.key")]
    certificates = None
    if not insecure:
        for path in files[:2]:
            check_certificate(path)
        read_secret(files[2])
        certificates = (files[0].read_bytes(), files[1].read_bytes(), files[2].read_bytes())
    return SuperLinkLifespanConfig(
        control_address="127.0.0.1:0",
        health_server_address=None,
        host=listeners.inner[0],
        port=listeners.inner[1],
        insecure=insecure,
        certificates=certificates,
        superexec_auth_secret=read_secret(folder / "superexec.secret"),
        authn_plugin=load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=True,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None if insecure else str(files[0]),
        ssl_certfile=None if insecure else str(files[1]),
        ssl_keyfile=None if insecure else str(files[2]),
        database=FLWR_IN_MEMORY_DB_NAME,
        isolation="process",
        runtime_dependency_install=False,
    )


def serve_link(listeners: Listeners, ready: Callable[[], None] = lambda: None) -> None:
    """Run the SuperLink until SIGINT or SIGTERM."""
    if not is_loopback(listeners.inner[0]):
        raise BadInput(
            "not-loopback", f"the inner side listens on {listeners.inner[0]!r}; it must be loopback"
        )
    if listeners.insecure and not is_loopback(listeners.public[0]):
        raise BadInput(
            "not-loopback",
            f"--insecure with the address {listeners.public[0]!r}; plain text is for loopback only",
        )
    config = superlink_config(listeners)
    give_memory_back()
    lifespan = importlib.import_module("flwr.superlink.cli.flower_superlink").SuperLinkLifespan
    app = create_app(config, lifespan)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    common: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
    }
    host, port = listeners.inner
    inner = uvicorn.Server(uvicorn.Config(app, host=host, port=port, **common))
    host, port = listeners.public
    gate: Any = FleetOnly(app)
    outer = uvicorn.Server(uvicorn.Config(gate, host=host, port=port, lifespan="off", **common))
    asyncio.run(_both(inner, outer, ready))


async def _both(inner: uvicorn.Server, outer: uvicorn.Server, ready: Callable[[], None]) -> None:
    """The loopback side first (it starts the application), then the public one; both end
    together."""
    tasks = [asyncio.create_task(inner.serve())]
    while not inner.started and not tasks[0].done():
        await asyncio.sleep(0.02)
    if inner.started:
        tasks.append(asyncio.create_task(outer.serve()))
        while not outer.started and not tasks[1].done():
            await asyncio.sleep(0.02)
        if outer.started:
            ready()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    inner.should_exit = outer.should_exit = True
    await asyncio.gather(*tasks)
