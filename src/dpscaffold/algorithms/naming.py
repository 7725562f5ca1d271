"""From a name and numbers, as configurations and commands give them, to an algorithm; and what goes
wrong in a user's own, in one sentence.

A name is an entry of ``ALGORITHMS``, or ``my_file:factory``: a function of a user's own file that
returns an :class:`~dpscaffold.Algorithm`. The keys of ``[algorithm]`` are the function's arguments.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dpscaffold.algorithms.base import Algorithm
from dpscaffold.algorithms.registry import ALGORITHMS
from dpscaffold.algorithms.server_optimisers import SERVERS
from dpscaffold.errors import BadInput, DeviceLost, Diverged, nearest

#: How a factory of the user's own may annotate a number.
NUMBERS = ("float", "int", float, int, Parameter.empty)

#: What says itself what to do when it is raised in a round.
SAID = (BadInput, Diverged, DeviceLost, OSError, MemoryError)

Made = TypeVar("Made")


def numbers_of(
    name: str, server: str | None, given: Mapping[str, Any], folder: Path | None = None
) -> dict[str, Any]:
    """Every number of the algorithm and of its server optimiser: those given, and the defaults.

    >>> numbers_of("fedprox", None, {}), numbers_of("fedavg", "momentum", {"beta": 0.5})
    ({'mu': 0.1}, {'beta': 0.5})
    """
    factories = factory_of(name, folder), _optimiser(server, None)
    known = {key: one for made in factories for key, one in signature(made).parameters.items()}
    for key, value in given.items():
        if key not in known:
            keys = ["name", "server", *known]
            raise BadInput(
                "unknown-key",
                f"unknown key algorithm.{key} for {name}{nearest(key, keys)}; "
                f"known here: {', '.join(keys)}",
            )
        one = known[key]
        numeric = type(one.default) in (int, float) and one.annotation in NUMBERS
        if numeric and isinstance(value, str):
            raise BadInput(
                "not-a-number",
                f"algorithm.{key} is {value!r}; it must be a number, {one.default} where it is "
                f"left out",
            )
    defaults = {key: one.default for key, one in known.items()}
    return {key: one for key, one in {**defaults, **given}.items() if one is not Parameter.empty}


def build(
    name: str,
    server: str | None = None,
    given: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Algorithm:
    """The algorithm of this name with these numbers, of which some may be left out, wrapped in the
    server optimiser.

    >>> build("fedavg", "momentum", {"beta": 0.5}).numbers
    {'server': 'momentum', 'beta': 0.5}
    """
    numbers, factory = given or {}, factory_of(name, folder)
    made = made_by(factory, name, "algorithm.name", Algorithm, _taken(factory, numbers))
    wrap = _optimiser(server, made)
    return wrap(**_taken(wrap, numbers))


def _optimiser(name: str | None, base: Any) -> Callable[..., Algorithm]:
    """What makes the algorithm with this server optimiser, given the optimiser's numbers."""
    return (lambda: base) if name is None else partial(SERVERS[name], base)


def _taken(factory: Callable[..., Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: numbers[key] for key in signature(factory).parameters if key in numbers}


def factory_of(
    name: str, folder: Path | None = None, argument: str = "algorithm.name"
) -> Callable[..., Algorithm]:
    """The function that makes the algorithm; files are looked for in ``folder`` (that of the
    configuration), in the working folder, then among what Python can import."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" in name:
        return own_function(name, folder, argument)
    raise BadInput(
        "unknown-algorithm",
        f"{argument} is {name!r}{nearest(name, list(ALGORITHMS))}; choose one of "
        f"{', '.join(ALGORITHMS)}, or name a function of your own as 'my_file:factory'",
    )


def own_function(name: str, folder: Path | None, argument: str) -> Callable[..., Any]:
    """The function that ``my_file:function`` names, in a file next to the configuration or among
    what Python can import."""
    place, _, function = name.partition(":")
    if place.endswith(".py") or not all(map(str.isidentifier, [*place.split("."), function])):
        raise BadInput(
            "bad-factory-name",
            f"{argument} is {name!r}; name a function of your own as 'my_file:factory', without "
            f"'.py'",
        )
    found: object = getattr(_module(name, folder, argument), function, None)
    if not callable(found):
        raise BadInput(
            "factory-not-found",
            f"{argument} is {name!r}, but {place} has no function {function!r}; name one",
        )
    return found


def made_by(
    factory: Callable[..., Any],
    name: str,
    argument: str,
    kind: type[Made],
    given: Mapping[str, Any],
) -> Made:
    """What a factory, which may be a user's own, makes of these arguments: one of ``kind``."""
    with own_failures(name, argument, "factory-failed", "whose factory failed", (BadInput,)):
        made = factory(**given)
    if isinstance(made, kind):
        return made
    raise BadInput(
        "wrong-factory-result",
        f"{argument} is {name!r}, which returned {made!r:.60}; the factory must return an object "
        f"of the class {kind.__name__}",
    )


def _module(name: str, folder: Path | None, argument: str) -> ModuleType:
    """A user's module: a file next to the configuration, or one that Python finds."""
    place, here = name.partition(":")[0], folder or Path.cwd()
    relative = Path(*place.split(".")).with_suffix(".py")
    with own_failures(name, argument, "import-failed", "whose import failed", (BadInput,)):
        for base in (here, Path.cwd()):
            if (base / relative).is_file():
                return _from_file(base.resolve(), place)
        if find_spec(place.partition(".")[0]) is not None:
            return importlib.import_module(place)
    raise BadInput(
        "module-not-found",
        f"{argument} is {name!r}, but there is no file {relative} in {here} and Python finds no "
        f"module {place!r}; put the file next to the configuration",
    )


@cache
def _from_file(base: Path, place: str) -> ModuleType:
    """The module of a file in this folder, which is run once."""
    unique = f"dpscaffold_own_{place.replace('.', '_')}"  # by it a resumed run knows its functions
    loader = SourceFileLoader(unique, str(base / Path(*place.split(".")).with_suffix(".py")))
    module = sys.modules[unique] = ModuleType(unique)  # dataclasses look their module up
    module.__file__ = loader.path
    sys.path.insert(0, str(base))  # the file may import its neighbours
    try:
        loader.exec_module(module)
    finally:
        sys.path.remove(str(base))
    return module


@contextmanager
def own_failures(
    name: str,
    argument: str = "algorithm.name",
    code: str = "algorithm-failed",
    failed: str = "whose functions, which must give tensors of the shapes that they are given, "
    "failed in a round",
    passed: tuple[type[Exception], ...] = SAID,
) -> Iterator[None]:
    """Turn what a user's own file raises into bad input, with its line where it is known and the
    traceback as its cause. What the package's own algorithms raise is let through, and so is what
    ``passed`` lists.

    >>> with own_failures("fedavg"):
    ...     pass
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a script that ends itself would end us
        text = " ".join(str(error).split())
        if isinstance(error, passed) or ":" not in name or "can't allocate memory" in text:
            raise
        file = name.partition(":")[0].rpartition(".")[2] + ".py"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [
            f" ({file}, line {one.lineno})" for one in frames if Path(one.filename).name == file
        ]
        raise BadInput(
            code,
            f"{argument} is {name!r}, {failed} with {type(error).__name__}: {text[:200]}"
            f"{''.join(lines[-1:])}; fix it",
        ) from error
