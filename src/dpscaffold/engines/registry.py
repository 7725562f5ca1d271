"""The engines by name."""

from __future__ import annotations

from collections.abc import Callable

from dpscaffold.config import Run
from dpscaffold.engines.loop import Loop
from dpscaffold.engines.machine import Hardware
from dpscaffold.engines.simulator import Simulator
from dpscaffold.engines.state import Gatherer
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import Randomness


def _simulator(
    setting: Run, federation: Federation, hardware: Hardware, randomness: Randomness
) -> Gatherer:
    return Simulator([setting], [federation], hardware, [randomness])


#: Each is made of a setting, its federation, the hardware and the streams.
ENGINES: dict[str, Callable[[Run, Federation, Hardware, Randomness], Gatherer]] = {
    "simulator": _simulator,
    "loop": Loop,
}
