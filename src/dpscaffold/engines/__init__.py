"""Where rounds run: the readable loop and the stacked simulator."""

from __future__ import annotations

from collections.abc import Callable

from dpscaffold.engines.aggregate import aggregate, mean_weights
from dpscaffold.engines.hardware import Hardware
from dpscaffold.engines.loop import Loop
from dpscaffold.engines.memories import Memories
from dpscaffold.engines.simulator import Simulator
from dpscaffold.engines.state import Draw, Engine, Gathered, StackedEngine, State
from dpscaffold.federation import Federation
from dpscaffold.randomness import Randomness
from dpscaffold.setting import Setting


def _simulator(
    setting: Setting, federation: Federation, hardware: Hardware, randomness: Randomness
) -> Engine:
    return Simulator([setting], [federation], hardware, [randomness])


#: Engines by name; each is made of a setting, its federation, the hardware and the streams.
ENGINES: dict[str, Callable[[Setting, Federation, Hardware, Randomness], Engine]] = {
    "simulator": _simulator,
    "loop": Loop,
}

__all__ = [
    "ENGINES",
    "Draw",
    "Engine",
    "Gathered",
    "Hardware",
    "Loop",
    "Memories",
    "Simulator",
    "StackedEngine",
    "State",
    "aggregate",
    "mean_weights",
]
