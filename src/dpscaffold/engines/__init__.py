"""Where rounds run: the readable loop and the stacked simulator."""

from dpscaffold.engines.loop import Loop
from dpscaffold.engines.simulator import Simulator
from dpscaffold.engines.state import Draw, Engine, RoundReport, State

__all__ = ["Draw", "Engine", "Loop", "RoundReport", "Simulator", "State"]
