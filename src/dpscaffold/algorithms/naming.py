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
        default, annotation = known[key].default, known[key].annotation
        numeric = type(default) in (int, float) and annotation in NUMBERS
        if numeric and isinstance(value, str):
            raise BadInput(
                "not-a-number",
                f"algorithm.{key} is {value!r}; it must be a number, {default} where it is left "
                f"out",
            )
    defaults = {key: one.default for key, one in known.items()}
    return {key: one for key, one in {**defaults, **given}.items() if one is not Parameter.empty}


def build(
    name: str,
    server: str | None = None,
    given: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Algorithm:
    """The algorithm of this name with these numbers, wrapped in the server optimiser.

    >>> build("fedavg", "momentum", {"beta": 0.5}).numbers
    {'server': 'momentum', 'beta': 0.5}
    """
    numbers, factory = numbers_of(name, server, given or {}, folder), factory_of(name, folder)
    said, called = f"algorithm.name is {name!r}", "dpscaffold.Algorithm"
    made = made_by(factory, said, Algorithm, called, _taken(factory, numbers))
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
    said = f"{argument} is {name!r}"
    if place.endswith(".py") or not all(map(str.isidentifier, [*place.split("."), function])):
        raise BadInput(
            "bad-factory-name",
            f"{said}; name a function of your own as 'my_file:factory', without '.py'",
        )
    found: object = getattr(_module(place, folder, said), function, None)
    if not callable(found):
        raise BadInput(
            "factory-not-found", f"{said}, but {place} has no function {function!r}; name one"
        )
    return found


def made_by(
    factory: Callable[..., Any], said: str, kind: type[Made], called: str, given: Mapping[str, Any]
) -> Made:
    """What a factory, which may be a user's own, makes of these arguments: one of ``kind``."""
    try:
        made = factory(**given)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(
            "factory-failed",
            f"{said}, whose factory failed with {type(error).__name__}: {error}; fix it or its "
            f"numbers",
        ) from error
    if isinstance(made, kind):
        return made
    raise BadInput(
        "wrong-factory-result",
        f"{said}, which returned {made!r:.60}; the factory must return a {called}",
    )


def _module(place: str, folder: Path | None, said: str) -> ModuleType:
    """A user's module: a file next to the configuration, or one that Python finds."""
    relative, here = Path(*place.split(".")).with_suffix(".py"), folder or Path.cwd()
    bases = [base for base in (here, Path.cwd()) if (base / relative).is_file()]
    try:
        return _from_file(bases[0].resolve(), place) if bases else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a script that ends itself would end us
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not bases and missing is not None and place.startswith(missing):
            raise BadInput(
                "module-not-found",
                f"{said}, but there is no file {relative} in {here} and Python finds no module "
                f"{place!r}; put the file next to the configuration",
            ) from error
        raise BadInput(
            "import-failed",
            f"{said}, whose import failed ({type(error).__name__}: {error}); fix {relative}",
        ) from error


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
def own_failures(name: str) -> Iterator[None]:
    """Turn what the functions of ``my_file:factory`` raise in a round into bad input, with their
    traceback as its cause. Other algorithms, and what says itself what to do, are let through.

    >>> with own_failures("fedavg"):
    ...     pass
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, BadInput | Diverged | DeviceLost | OSError | MemoryError)
        if known or ":" not in name or "can't allocate memory" in str(error):
            raise
        file = name.partition(":")[0].rpartition(".")[2] + ".py"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f", line {one.lineno}" for one in frames if Path(one.filename).name == file]
        raise BadInput(
            "algorithm-failed",
            f"algorithm.name is {name!r}, which failed in a round with {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]} ({file}{''.join(lines[-1:])}); fix it: each "
            f"function must give tensors of the shapes that it is given",
        ) from error
