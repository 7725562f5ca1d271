"""From a name and numbers, as configurations and commands give them, to an algorithm.

A name is an entry of ``ALGORITHMS``, or ``my_file:factory``: a function of a user's own file that
returns an :class:`~dpscaffold.Algorithm`. The keys of ``[algorithm]`` are the function's arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dpscaffold.algorithms.base import Algorithm
from dpscaffold.algorithms.registry import ALGORITHMS
from dpscaffold.algorithms.server import SERVERS
from dpscaffold.errors import BadInput, nearest

Factory = Callable[..., Algorithm]

#: Users' own files that were loaded, by path: a file is run once.
_loaded: dict[Path, ModuleType] = {}


def numbers_of(
    name: str, server: str | None, given: Mapping[str, Any], folder: Path | None = None
) -> dict[str, Any]:
    """Every number of the algorithm and of its server optimiser: those given, and the defaults.

    >>> numbers_of("fedprox", None, {}), numbers_of("fedavg", "momentum", {"beta": 0.5})
    ({'mu': 0.1}, {'beta': 0.5})
    """
    known = {**_arguments(factory_of(name, folder)), **_arguments(_server(server), skip=1)}
    for key in given:
        if key not in known:
            keys = ["name", "server", *known]
            raise BadInput(
                "unknown-key",
                f"unknown key algorithm.{key} for {name}{nearest(key, keys)}; "
                f"known here: {', '.join(keys)}",
            )
    numbers = {**known, **given}
    numeric = _numeric(factory_of(name, folder)) | _numeric(_server(server))
    for key in numeric & given.keys():
        if isinstance(given[key], str):
            raise BadInput(
                "not-a-number",
                f"algorithm.{key} is {given[key]!r}; it must be a number, {known[key]} where it is "
                f"left out",
            )
    for key, value in numbers.items():
        if value is inspect.Parameter.empty:
            raise BadInput(
                "missing-key",
                f"algorithm.{key} is missing, and {name} has no default; give a value",
            )
    return numbers


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
    numbers = numbers_of(name, server, given or {}, folder)
    factory = factory_of(name, folder)
    own = {key: numbers[key] for key in _arguments(factory)}
    try:
        made = factory(**own)
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(
            "factory-failed",
            f"algorithm.name is {name!r}, whose factory failed with {type(error).__name__}: "
            f"{error}; fix it or its numbers",
        ) from error
    if not isinstance(made, Algorithm):
        raise BadInput(
            "wrong-factory-result",
            f"algorithm.name is {name!r}, which returned {type(made).__name__}; "
            f"the factory must return a dpscaffold.Algorithm",
        )
    if server is None:
        return made
    return SERVERS[server](made, **{k: numbers[k] for k in _arguments(SERVERS[server], skip=1)})


def factory_of(name: str, folder: Path | None = None, argument: str = "algorithm.name") -> Factory:
    """The function that makes the algorithm; files are looked for in ``folder`` (that of the
    configuration), in the working folder, then among what Python can import."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        raise BadInput(
            "unknown-algorithm",
            f"{argument} is {name!r}{nearest(name, list(ALGORITHMS))}; choose one of "
            f"{', '.join(ALGORITHMS)}, or name a function of your own as 'my_file:factory'",
        )
    returns = "one that returns a dpscaffold.Algorithm"
    return cast("Callable[..., Algorithm]", own_function(name, folder, argument, returns))


def own_function(
    name: str, folder: Path | None, argument: str, returns: str = "one that it has"
) -> Callable[..., Any]:
    """The function that ``my_file:function`` names, in a file next to the configuration or among
    what Python can import."""
    place, _, function = name.partition(":")
    said = f"{argument} is {name!r}"
    if place.endswith(".py"):
        bare = place.removesuffix(".py").removeprefix("./")
        raise BadInput(
            "bad-factory-name", f"{said}; leave the ending out: '{bare}:{function or 'factory'}'"
        )
    if not place or not function or not all(part.isidentifier() for part in place.split(".")):
        raise BadInput(
            "bad-factory-name", f"{said}; name a function of your own as 'my_file:factory'"
        )
    factory = getattr(_module(place, folder, said), function, None)
    if not callable(factory):
        raise BadInput(
            "factory-not-found", f"{said}, but {place} has no function {function!r}; name {returns}"
        )
    return cast("Callable[..., Any]", factory)


def _server(name: str | None) -> Factory | None:
    if name is not None and name not in SERVERS:
        raise BadInput(
            "unknown-choice",
            f"algorithm.server is {name!r}{nearest(name, list(SERVERS))}; choose one of "
            f"{', '.join(SERVERS)}, or leave it out",
        )
    return None if name is None else SERVERS[name]


def _arguments(factory: Factory | None, skip: int = 0) -> dict[str, Any]:
    """The arguments of a factory and their defaults, without the first ``skip``."""
    if factory is None:
        return {}
    found = list(inspect.signature(factory).parameters.values())[skip:]
    return {p.name: p.default for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _numeric(factory: Factory | None) -> set[str]:
    """The arguments of a factory that are numbers: by their default, and by no other annotation."""
    if factory is None:
        return set()
    plain = ("float", "int", float, int, inspect.Parameter.empty)
    return {
        name
        for name, given in inspect.signature(factory).parameters.items()
        if type(given.default) in (int, float) and given.annotation in plain
    }


def _module(place: str, folder: Path | None, said: str) -> ModuleType:
    """A user's module: a file next to the configuration, or one that Python finds."""
    relative = Path(*place.split(".")).with_suffix(".py")
    for base in (folder, Path.cwd()):
        if base is not None and (base / relative).is_file():
            return _from_file((base / relative).resolve(), place, base, said)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not place.startswith(error.name):
            raise BadInput(
                "import-failed", f"{said}, whose import failed ({error}); fix the file"
            ) from error
        raise BadInput(
            "module-not-found",
            f"{said}, but there is no file {relative} in {folder or Path.cwd()} and Python finds "
            f"no module {place!r}; put the file next to the configuration",
        ) from error
    except (Exception, SystemExit) as error:
        raise BadInput(
            "import-failed",
            f"{said}, whose import failed ({type(error).__name__}: {error}); fix the file",
        ) from error


def _from_file(path: Path, place: str, base: Path, said: str) -> ModuleType:
    if path in _loaded:
        return _loaded[path]
    unique = f"dpscaffold_own_{place.replace('.', '_')}"  # by it a resumed run knows its functions
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses look their module up
    sys.path.insert(0, str(base))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that ends itself would end us
        del sys.modules[unique]
        raise BadInput(
            "import-failed",
            f"{said}, whose import failed ({type(error).__name__}: {error}); fix {path.name}",
        ) from error
    finally:
        sys.path.remove(str(base))
    _loaded[path] = module
    return module
