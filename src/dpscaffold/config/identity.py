"""What an algorithm or a task is, in words: by this a run is known again on resume."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dpscaffold.algorithms import Algorithm
from dpscaffold.tasks import Task

#: How deep the values inside an algorithm's parts are followed.
DEPTH = 5


def task_identity(task: Task) -> dict[str, Any]:
    """A task's name, its size, and its loss with the numbers it holds, in plain JSON values."""
    loss = getattr(task, "loss", None)
    held = {} if loss is None else {"loss": _part(loss)}
    return {"kind": task.name, "parameters": task.parameters, **held}


def algorithm_identity(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm's name, its parts and every number that can be seen in them, in plain JSON
    values.

    A part is a function, named; a value (a dataclass, a ``functools.partial``, a function with
    defaults or a closure), named with the numbers it holds. What hides its numbers elsewhere, in a
    global variable say, cannot be told apart.

    >>> from dpscaffold import fedprox
    >>> algorithm_identity(fedprox(0.1))["direction"]["form"]["mu"]
    0.1
    """
    return {
        field.name: _part(value)
        for field in fields(algorithm)
        if field.init and (value := getattr(algorithm, field.name)) not in (None, ())
    }


def _digest_of_list(plain: Any) -> Any:
    """A list as its digest; a single number as it is."""
    return hashlib.sha256(repr(plain).encode()).hexdigest() if isinstance(plain, list) else plain


def _part(value: Any, depth: int = DEPTH) -> Any:
    """A value in words; beyond ``depth`` only its name, as a function may hold itself."""
    if isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "tolist"):  # numbers and arrays of numpy and torch
        return _digest_of_list(value.tolist())
    if depth == 0:
        return _name(value)
    if isinstance(value, list | tuple):
        return [_part(item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _part(item, depth - 1) for key, item in value.items()}
    if isinstance(value, Algorithm):
        return algorithm_identity(value)
    return _object(value, depth)


def _object(value: Any, depth: int) -> Any:
    """The name of a function or object, with what it holds."""
    held = {name: _part(item, depth - 1) for name, item in _held(value).items()}
    return {"kind": _name(value), **held} if held else _name(value)


def _held(value: Any) -> dict[str, Any]:
    """The values that a function carries with it, or that stand in an object's attributes."""
    if isinstance(value, type):
        return {}
    if isinstance(value, functools.partial):
        return {"of": value.func, "given": value.args, **value.keywords}
    code = getattr(value, "__code__", None)
    if code is None:
        return dict(getattr(value, "__dict__", {}))
    cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
    defaults = value.__defaults__ or ()
    named = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    held = {name: cell.cell_contents for name, cell in cells}
    return held | dict(zip(named, defaults, strict=True)) | (value.__kwdefaults__ or {})


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
