"""Flower's own handlers, called without the layers of its web application.

A round is some twenty small requests for each site, and the application spends several milliseconds
of each on routing, layers and threads. For the requests that rounds are made of, this calls the
same handlers with the same state, once who asks was checked as Flower checks it. Whatever is not
plain (another path, a wrong clock, an error) goes to the application as it came, so that its
answers are Flower's.
"""

from __future__ import annotations

import asyncio
import datetime
from base64 import b64decode
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from flwr.common.constant import (
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, TASK_TOKEN_HEADER
from flwr.supercore.date import now
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

_Scope = MutableMapping[str, Any]
_Headers = list[tuple[bytes, bytes]]
#: What answers a request: the request, its headers and the state.
_Handler = Callable[[Any, _Headers, Any], Any]

#: Larger bodies are hashed and stored in a thread, so that other sites do not wait.
_AT_ONCE = 64 << 10
#: Answers are handed to the connection in slices: it keeps several copies of what it has not sent.
_SLICE = 256 << 10


class NotPlain(Exception):
    """A request that Flower's application has to answer."""


class Direct:
    """Answers a request by its handler, or by the application."""

    def __init__(
        self, app: Any, state: Callable[[], Any], handlers: Mapping[str, _Handler]
    ) -> None:
        self.app, self._state, self._handlers = app, state, handlers

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        """One request, whose body comes in one piece or in several."""
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._handlers.get(str(scope["path"]))
        media = (b"content-type", PROTOBUF_MEDIA_TYPE.encode())
        if handler is None or media not in scope["headers"]:
            await self.app(scope, receive, send)
            return
        body, messages = await _read(receive)
        work = (str(scope["path"]), handler, list(scope["headers"]), body)
        try:
            many = len(body) > _AT_ONCE
            answer = await asyncio.to_thread(self._answer, *work) if many else self._answer(*work)
        except Exception:  # whatever it is, Flower says it
            await self.app(scope, _again(messages, receive), send)
            return
        given = [media, (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": given})
        for start in range(0, len(answer) or 1, _SLICE):  # a slow reader holds one slice, not all
            body, more = answer[start : start + _SLICE], start + _SLICE < len(answer)
            await send({"type": "http.response.body", "body": body, "more_body": more})

    def _answer(self, path: str, handler: _Handler, headers: _Headers, body: bytes) -> bytes:
        asked = PROTOBUF_REQUEST_TYPES["POST", path].FromString(body)
        answered: bytes = handler(asked, headers, self._state()).SerializeToString()
        return answered


def direct_fleet(app: Any, state: Callable[[], Any]) -> Direct:
    """For the requests of sites, behind a gate that has checked the signature of the time stamp."""
    return Direct(app, state, {f"/v1/fleet/{name}": _of_node(name) for name in _FLEET})


def direct_runtime(app: Any, state: Callable[[], Any]) -> Direct:
    """For the requests of the process that drives a run."""
    return Direct(app, state, {f"/v1/runtime/{name}": _of_task(name) for name in _RUNTIME})


def _pull_messages(asked: Any, state: Any) -> Any:
    """The next message for a node, past those that were withdrawn.

    Flower answers with nothing where the next one was withdrawn. A site that comes back would then
    find one of the rounds that it missed at every poll, and never the present one.
    """
    while True:
        before = state.num_message_ins()
        found = fleet_handlers.pull_messages(request=asked, state=state, store=state.object_store)
        if found.messages_list or state.num_message_ins() >= before:  # else one was thrown away
            return found


_FLEET: Mapping[str, Callable[[Any, Any], Any]] = {
    "pull-messages": _pull_messages,
    "push-messages": lambda asked, state: fleet_handlers.push_messages(request=asked, state=state),
    "pull-object": lambda asked, state: fleet_handlers.pull_object(request=asked, state=state),
    "push-object": lambda asked, state: fleet_handlers.push_object(request=asked, state=state),
    "confirm-message-received": lambda asked, state: fleet_handlers.confirm_message_received(
        request=asked, state=state, store=state.object_store
    ),
    "send-node-heartbeat": lambda asked, state: fleet_handlers.send_node_heartbeat(
        request=asked, state=state
    ),
}

_RUNTIME: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "pull-messages": runtime_handlers.pull_messages,
    "push-messages": runtime_handlers.push_messages,
    "pull-object": runtime_handlers.pull_object,
    "push-object": runtime_handlers.push_object,
    "confirm-message-received": runtime_handlers.confirm_message_received,
    "get-nodes": runtime_handlers.get_nodes,
}


def _of_node(name: str) -> _Handler:
    """A handler for sites: the time stamp is of now, and the node is the key's."""

    def answer(asked: Any, headers: _Headers, state: Any) -> Any:
        stamp = _only(headers, TIMESTAMP_HEADER).decode("ascii")
        age = (now() - datetime.datetime.fromisoformat(stamp)).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            raise NotPlain("the time stamp is not of now")
        key = b64decode(_only(headers, FLEET_HTTP_PUBLIC_KEY_HEADER), validate=True)
        if state.get_node_id_by_public_key(key) != asked.node.node_id:
            raise NotPlain("the node is not the key's")
        return _FLEET[name](asked, state)

    return answer


def _of_task(name: str) -> _Handler:
    """A handler for the driver of a run: the token is that of a task."""

    def answer(asked: Any, headers: _Headers, state: Any) -> Any:
        task = state.get_task_by_token(_only(headers, TASK_TOKEN_HEADER).decode("ascii"))
        if task is None:
            raise NotPlain("the token is nobody's")
        return _RUNTIME[name](asked, state, task)

    return answer


def _only(headers: _Headers, name: str) -> bytes:
    """The value of a header that is there once."""
    found = [value for key, value in headers if key == name.lower().encode()]
    if len(found) != 1:
        raise NotPlain(f"{name} is there {len(found)} times")
    return found[0]


async def _read(receive: Any) -> tuple[bytes, list[MutableMapping[str, Any]]]:
    """A whole body, and the messages that it came in."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return b"".join(message.get("body", b"") for message in messages), messages


def _again(messages: list[MutableMapping[str, Any]], receive: Any) -> Any:
    """What an application receives: the messages that were received, then whatever comes."""
    waiting = messages[::-1]

    async def again() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else dict(await receive())

    return again
