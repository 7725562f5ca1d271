"""The SuperLink behind a gate: Flower's own application in our process, with two listeners.

The public listener answers ``/v1/fleet/*``, where requests are signed by node keys, and nothing
else: Flower's open build lets anybody who reaches its other paths submit an application or claim a
task. The loopback listener answers everything, for the process that drives a run. State is in
memory: what is worth keeping is in run folders and at the sites.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.main import create_app
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dpscaffold.deployment.provision import check_certificate, is_loopback, read_secret
from dpscaffold.deployment.transports.flower.direct import direct_fleet, direct_runtime
from dpscaffold.deployment.transports.flower.gate import (
    ConnectionLimits,
    FleetOnly,
    GuardedSocket,
    Hurried,
    OperatorOnly,
)
from dpscaffold.deployment.transports.flower.revoking import LiveRoster
from dpscaffold.engine.device import reuse_memory, trim_memory
from dpscaffold.errors import BadInput

#: Seconds within which a client must have agreed on TLS.
HANDSHAKE = 10.0
#: Seconds after which memory that was freed and is not used again is given back.
_TIDY = 10.0


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


#: Flower's layers that do something only for paths that begin so; each costs about a millisecond
#: of every request. A layer that is not listed here stays where it is.
_WHERE = {
    "ControlSensitiveResponseMiddleware": "/v1/control/",
    "ControlAuthenticationMiddleware": "/v1/control/",
    "ControlLicenseMiddleware": "/v1/control/",
    "ControlEventLogMiddleware": "/v1/control/",
    "RuntimeTracingMiddleware": "/v1/runtime/",
    "NodeAuthMiddleware": "/v1/fleet/",
}
#: Those that do nothing with the configuration above, which logs no events.
_IDLE = ("FleetEventLogMiddleware",)


class OnlyThere:
    """A layer of an application that is called for the paths that it is for, and passed by all
    other requests."""

    def __init__(self, app: ASGIApp, layer: Middleware, prefix: str) -> None:
        self.app, self.prefix = app, prefix
        self.layer = layer.cls(app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        passes = scope["type"] == "http" and not scope["path"].startswith(self.prefix)
        await (self.app if passes else self.layer)(scope, receive, send)


def lighten(app: Starlette) -> None:
    """Let requests pass by the layers that would do nothing with them."""
    kept = []
    for layer in app.user_middleware:
        name = getattr(layer.cls, "__name__", "")
        if name in _WHERE:
            kept.append(Middleware(OnlyThere, layer=layer, prefix=_WHERE[name]))
        elif name not in _IDLE:
            kept.append(layer)
    app.user_middleware = kept


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
    reuse_memory()
    lifespan = importlib.import_module("flwr.superlink.cli.flower_superlink").SuperLinkLifespan
    app = create_app(config, lifespan)
    lighten(app)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    common: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
    }
    host, port = listeners.inner
    secret = config.superexec_auth_secret
    assert secret is not None
    state = app.state.linkstate_factory.state
    within: Any = OperatorOnly(direct_runtime(app, state), secret)
    inner = uvicorn.Server(uvicorn.Config(within, host=host, port=port, **common))
    sites = LiveRoster(listeners.folder)
    gate: Any = FleetOnly(direct_fleet(app, state), sites)
    outer = uvicorn.Server(uvicorn.Config(gate, lifespan="off", http=Hurried, ws="none", **common))
    public = GuardedSocket.listening(*listeners.public, ConnectionLimits.of(len(sites.members())))
    asyncio.run(_both(inner, outer, public, ready))


async def _both(
    inner: uvicorn.Server, outer: uvicorn.Server, public: GuardedSocket, ready: Callable[[], None]
) -> None:
    """The loopback side first (it starts the application), then the public one; both end
    together."""
    tasks = [asyncio.create_task(inner.serve())]
    while not inner.started and not tasks[0].done():
        await asyncio.sleep(0.02)
    if inner.started:
        loop: Any = asyncio.get_running_loop()  # uvicorn sets no limit for the TLS handshake
        if outer.config.ssl_certfile:
            limited = functools.partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE)
            loop.create_server = limited
        tasks.append(asyncio.create_task(outer.serve(sockets=[public])))
        while not outer.started and not tasks[1].done():
            await asyncio.sleep(0.02)
        if outer.started:
            ready()
    tidying = asyncio.create_task(_tidy())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tidying.cancel()
    inner.should_exit = outer.should_exit = True
    await asyncio.gather(*tasks)


async def _tidy() -> None:
    """Give memory back that was freed and is not used again."""
    while True:
        await asyncio.sleep(_TIDY)
        await asyncio.to_thread(trim_memory)
