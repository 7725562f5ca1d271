"""Where a run computes: nobody's agreement, and no part of what is learnt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpscaffold.engines.machine import sent


@dataclass(frozen=True)
class Hardware:
    """Devices that share a round's participants, rows computed together (None: as many as fit), and
    threads (None: as many as PyTorch takes).

    They change no draw, only the order of sums, so they are stored with a checkpoint and taken up
    again with it.
    """

    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    chunk: int | None = None
    threads: int | None = None

    @property
    def device(self) -> torch.device:
        """The first device: there the server's state lives."""
        return self.devices[0]

    def cores(self, device: torch.device) -> int:
        """How many threads share a worker's rows: those of a CPU that is named once."""
        if device.type != "cpu" or len(self.devices) > 1:
            return 1
        return self.threads or torch.get_num_threads()

    @classmethod
    def on(cls, device: torch.device | str, chunk: int | None = None) -> Hardware:
        """One device."""
        return cls((torch.device(device),), chunk)


def placed(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU where it is used."""
    return values if device.type == "cpu" else sent(values, device)
