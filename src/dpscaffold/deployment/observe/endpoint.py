"""A small web server on loopback: a status page, ``/healthz`` and ``/status.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dpscaffold.deployment.provision import host_and_port, is_loopback
from dpscaffold.errors import BadInput

#: What a path answers: the type of its content, and a function that makes it.
Page = tuple[str, Callable[[], str]]

TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
JSON = "application/json"
#: A page runs no script and loads nothing from anywhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def serve_pages(option: str, address: str, pages: Mapping[str, Page]) -> ThreadingHTTPServer:
    """Listen on an address of this machine and answer GET requests; other paths get 404.

    Args:
        option: The option that names the address, for messages.
        address: ``host:port`` on loopback. Port 0 is refused.
        pages: What each path answers. A page that cannot be made answers 503.
    """
    host, port = host_and_port(option, address)
    if not is_loopback(host):
        raise BadInput(
            "not-loopback",
            f"{option} is {address!r}; status pages are for this machine only, so give a "
            f"loopback address such as 127.0.0.1:{port}",
        )
    try:
        server = ThreadingHTTPServer((host, port), _handler(pages))
    except OSError:
        raise BadInput(
            "address-taken", f"{option}: the address {address} is taken; choose another"
        ) from None
    server.daemon_threads = True
    return server


def _is_own(host: str) -> bool:
    """Whether a request names this machine. A web page elsewhere could make its own name lead here,
    and read the answer in the browser of whoever looks at that page.

    >>> _is_own("127.0.0.1:8080"), _is_own("localhost"), _is_own("evil.example:8080")
    (True, True, False)
    """
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return is_loopback(name.strip("[]"))


def _handler(pages: Mapping[str, Page]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers one request; says nothing on the terminal."""

        timeout = 10
        server_version, sys_version = "dpscaffold", ""

        def do_GET(self) -> None:
            """One page, or a code without words."""
            if not _is_own(self.headers.get("Host", "")):
                self._answer(403, TEXT, "")
                return
            kind, make = pages.get(self.path.partition("?")[0], (TEXT, None))
            if make is None:
                self._answer(404, TEXT, "")
                return
            try:
                text = make()
            except (BadInput, OSError, ValueError):
                self._answer(503, TEXT, "not available\n")
                return
            self._answer(200, kind, text)

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(content))),
                ("Content-Security-Policy", POLICY),
                ("X-Content-Type-Options", "nosniff"),
                ("Cache-Control", "no-store"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: requests are not logged."""

    return Handler
