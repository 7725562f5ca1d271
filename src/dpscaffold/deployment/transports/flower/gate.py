"""Who may cost the SuperLink anything: sites of the roster, and on loopback who knows the secret.

Flower reads a request's whole body before it looks at the signature. Here a stranger's body is
never read: the signature covers a time stamp in the headers, so it is checked first. Connections
are counted by address, and those that say nothing are closed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import resource
import socket
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dpscaffold.deployment.protocol.messages import LONGEST_HEADER
from dpscaffold.deployment.transports.flower.revoking import LiveRoster
from dpscaffold.deployment.transports.flower.wire import SMALL

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

#: No request of a site is longer, however large the model and the roster: Flower cuts arrays into
#: parts, smaller vectors and headers are one object each, and a message's head names its parts, of
#: which a megabyte has room for 15,000 (75 GB).
LARGEST_BODY = max(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, SMALL, LONGEST_HEADER) + (1 << 20)
#: Bodies that the gate reads for one site at a time; a node sends two parts at a time.
MOST_BODIES = 8
#: The longest head of a request.
LARGEST_HEAD = 64 << 10
#: Seconds for a request's headers, and for its body; slower ones are closed.
HEAD_SECONDS, BODY_SECONDS = 10.0, 120.0
#: The header with which the operator's own processes call the control paths.
CONTROL_HEADER = "x-dpscaffold-control"


def control_token(secret: bytes) -> str:
    """What proves on loopback that a process may read the server's secret."""
    return hmac.new(secret, b"dpscaffold control", hashlib.sha256).hexdigest()


class ControlInterceptor:
    """Adds the token to every request of a client."""

    def __init__(self, secret: bytes) -> None:
        self._token = control_token(secret)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> Any:
        """One request."""
        add_headers(context.request, {CONTROL_HEADER: self._token})
        return call_next(context)


class OperatorOnly:
    """The loopback side: control paths only with the token, so that another user of this machine
    can neither stop runs nor unregister nodes."""

    def __init__(self, app: _App, secret: bytes) -> None:
        self.app, self._token = app, control_token(secret).encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One request."""
        if scope["type"] == "http" and not self._is_allowed(scope):
            await refuse(send, 401)
        else:
            await self.app(scope, receive, send)

    def _is_allowed(self, scope: _Scope) -> bool:
        """Runtime paths have tokens of Flower's own."""
        token = headers_of(scope).get(CONTROL_HEADER, b"")
        runtime = str(scope["path"]).startswith("/v1/runtime/")
        return runtime or hmac.compare_digest(token, self._token)


class FleetOnly:
    """The public side: lets requests of the roster's sites through, and answers everything else
    without reading it."""

    def __init__(self, app: _App, sites: LiveRoster) -> None:
        self.app, self.sites = app, sites
        self._reading: Counter[bytes] = Counter()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
        elif not self._is_fleet(scope):
            await refuse(send, 404)
        elif not self._is_signed(headers_of(scope)):
            await refuse(send, 401)
        else:
            body = await self._body_of(scope, receive)
            if isinstance(body, int):
                await refuse(send, body)
            else:
                await self.app(scope, _replayed(body, receive), send)

    async def _body_of(self, scope: _Scope, receive: _Receive) -> bytes | int:
        """A body, or a status; 429 where a site sends too many at a time."""
        key = headers_of(scope)[FLEET_HTTP_PUBLIC_KEY_HEADER.lower()]
        if self._reading[key] >= MOST_BODIES:
            return 429
        self._reading[key] += 1
        try:
            return await body_of(scope, receive)
        finally:
            self._reading[key] -= 1

    @staticmethod
    def _is_fleet(scope: _Scope) -> bool:
        """One plain segment after the prefix, exactly as it was sent: no dots, no escapes."""
        path, raw = str(scope["path"]), scope.get("raw_path") or b""
        rest = path.removeprefix("/v1/fleet/")
        plain = rest.replace("-", "").isalnum() and rest.isascii()
        return rest != path and plain and raw.partition(b"?")[0] == path.encode()

    def _is_signed(self, headers: Mapping[str, bytes]) -> bool:
        """Whether a site of the roster signed the time stamp. Whether that is recent, Flower asks
        later, and answers such that the site can tell a wrong clock from an unknown key."""
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.lower()], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.lower()], validate=True)
            stamp = headers[TIMESTAMP_HEADER.lower()]
            known = self.sites.admits(key)
            return known and verify_signature(bytes_to_public_key(key), stamp, signature)
        except (KeyError, ValueError, TypeError):
            return False


def headers_of(scope: _Scope) -> dict[str, bytes]:
    """A request's headers, names in small letters; of several the first, as Flower reads them."""
    return {name.decode("latin-1"): value for name, value in reversed(scope["headers"])}


async def refuse(send: _Send, status: int) -> None:
    """An empty answer, after which the connection is closed: nothing more is read from it."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def body_of(scope: _Scope, receive: _Receive, seconds: float = BODY_SECONDS) -> bytes | int:
    """A request's body, or the status with which it is refused: too long (413), too slow (408)."""
    declared = headers_of(scope).get("content-length", b"0")
    if not declared.isdigit() or int(declared) > LARGEST_BODY:
        return 413
    parts: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return 400
                parts.append(message.get("body", b""))
                length += len(parts[-1])
                if length > LARGEST_BODY:
                    return 413
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        return 408


def _replayed(body: bytes, receive: _Receive) -> _Receive:
    """What an application receives: the body in one piece, then whatever comes."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return again


class Hurried(HttpToolsProtocol):
    """Closes a connection whose first request is not there in time, or has an endless head: the
    parser keeps a head in memory until it is whole."""

    _head = 0

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._head_due = self.loop.call_later(HEAD_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._head_due.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head, which are counted, or of a body, which waits until it is asked for."""
        self._head += len(data)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head = 0
        elif self._head > LARGEST_HEAD:
            self.transport.abort()

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


@dataclass
class ConnectionLimits:
    """How many connections one address, and all together, may have open, and how many new ones an
    address may open in a second (``burst`` of them at once)."""

    each: int
    total: int
    burst: float
    rate: float
    now: Callable[[], float] = time.monotonic
    open: dict[str, int] = field(default_factory=dict)
    _saved: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, sites: int) -> ConnectionLimits:
        """For a federation of this number of sites, which may share one address."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        each = 64 + 8 * sites
        return cls(each, max(each, wanted - 256), 2.0 * each, 20.0 + 2 * sites)

    def admit(self, address: str) -> bool:
        """Count a new connection, unless there are too many."""
        if len(self._saved) > 10_000:  # those without a connection start again
            self._saved = {a: self._saved[a] for a in self._saved if a in self.open}
        then, left = self._saved.get(address, (self.now(), self.burst))
        now = self.now()
        left = min(self.burst, left + self.rate * (now - then))
        full = self.open.get(address, 0) >= self.each or sum(self.open.values()) >= self.total
        if left < 1 or full:
            self._saved[address] = (now, left)
            return False
        self._saved[address] = (now, left - 1)
        self.open[address] = self.open.get(address, 0) + 1
        return True

    def closed(self, address: str) -> None:
        """A connection has ended."""
        self.open[address] -= 1
        if not self.open[address]:
            del self.open[address]


def network_of(address: str) -> str:
    """What is counted as one address: an IPv4 address, or the first 64 bits of an IPv6 one, since a
    single host has all the rest.

    >>> network_of("192.0.2.7"), network_of("2001:db8:1:2:3::4"), network_of("::ffff:192.0.2.7")
    ('192.0.2.7', '2001:db8:1:2::', '192.0.2.7')
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(found) >> 64 << 64))


class _Counted(socket.socket):
    """A connection that is counted until it is closed."""

    ended: Callable[[], None] | None = None

    def close(self) -> None:
        """End the connection."""
        ended, self.ended = self.ended, None
        super().close()
        if ended is not None:
            ended()


class GuardedSocket(socket.socket):
    """A listening socket that closes connections beyond the limits before anything is read."""

    limits: ConnectionLimits

    @classmethod
    def listening(cls, host: str, port: int, limits: ConnectionLimits) -> GuardedSocket:
        """A socket that listens on this address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = cls(family, socket.SOCK_STREAM)
        made.limits = limits
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        return made

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection within the limits."""
        while True:
            connection, peer = super().accept()
            address = network_of(str(peer[0]))
            if self.limits.admit(address):
                counted = _Counted(
                    connection.family, connection.type, connection.proto, connection.detach()
                )
                counted.ended = functools.partial(self.limits.closed, address)
                return counted, peer
            connection.close()
