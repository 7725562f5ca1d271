"""Devices and stop signals: where a run computes."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from dpscaffold.errors import BadInput


def pick_device(name: str) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:1`` or ``auto`` as a device that is really there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(
            "unknown-device", f"device is {name!r}; choose cpu, cuda, cuda:N or auto"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise BadInput("unknown-device", f"device is {name!r}; choose cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            "device-not-found",
            f"device is {name!r}, and this machine has {torch.cuda.device_count()} CUDA devices; "
            f"use cpu or auto",
        )
    return device


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Hardware:
    """Where a run computes, which is nobody's agreement and no part of what is learnt: the device,
    rows computed together (None: as many as fit), and threads (None: as many as PyTorch takes).

    They change no draw, only the order of sums, so they are stored with a checkpoint and taken up
    again with it.
    """

    device: torch.device = CPU
    chunk: int | None = None
    threads: int | None = None

    @property
    def cores(self) -> int:
        """How many threads share the rows of a CPU."""
        if self.device.type != "cpu":
            return 1
        return self.threads or torch.get_num_threads()


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on the device, without waiting for what the device is doing; itself where
    that is the CPU."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


#: How PyTorch and the libraries under it say that a device gave up.
_GAVE_UP = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_", "NCCL error")


def device_failed(error: BaseException) -> bool:
    """Whether a device gave up, rather than the program or the room in its memory.

    >>> device_failed(RuntimeError("CUDA error: unspecified launch failure"))
    True
    >>> device_failed(RuntimeError("sizes differ")), device_failed(MemoryError("CUDA error"))
    (False, False)
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    said = isinstance(error, getattr(torch, "AcceleratorError", ()))
    return said or any(sign in str(error) for sign in _GAVE_UP)


def full_precision() -> None:
    """Products and convolutions of a GPU in float32 throughout, not in TF32's 10 bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def reuse_memory() -> None:
    """Have freed buffers of any size kept for the next ones, until :func:`trim_memory`, by all
    threads together. Call it before threads are started.

    Else every large buffer is returned to the system, which clears each page of the next one: at
    10⁷ parameters that takes longer than what is computed. For processes whose work comes in
    rounds, and which trim their memory between them or end. Where there are no such switches (they
    are glibc's), nothing happens.
    """
    most_mapped, trim_above, arenas = -4, -1, -8  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(most_mapped, 0)
        library.mallopt(trim_above, (1 << 31) - 1)
        library.mallopt(arenas, 1)


def trim_memory() -> None:
    """Give freed buffers back to the system."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Collect the names of stop signals, so that the round in progress can end in order.

    A second Ctrl-C stops at once. Outside the main thread, signals are left alone.
    """
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: object) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
