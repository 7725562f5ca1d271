"""Devices, their memory, and stop signals: where a run computes."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor

from dpscaffold.errors import BadInput

CPU = torch.device("cpu")

Made = TypeVar("Made")

_log = logging.getLogger(__name__)

#: How PyTorch and the libraries under it say that a device gave up.
_GAVE_UP = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS_STATUS_")

#: How PyTorch says on a CPU that there is no memory left.
_NO_ROOM = ("can't allocate memory", "not enough memory", "out of memory")


def pick_device(name: str) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:1`` or ``auto`` as a device that is really there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = str(name).partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        raise BadInput("unknown-device", f"device is {name!r}; choose cpu, cuda, cuda:N or auto")
    device = torch.device(name)
    if kind == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            "device-not-found",
            f"device is {name!r}, and this machine has {torch.cuda.device_count()} CUDA devices; "
            f"use cpu or auto",
        )
    return device


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, without waiting for what the device is doing."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


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


def out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory was not enough.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("sizes differ"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _NO_ROOM)


#: Programs that could not be run here, and so are not tried again.
_refused: set[str] = set()


def tried(name: str, device: torch.device, program: Callable[[], Made]) -> Made | None:
    """What a program of a GPU made (or of Triton's interpreter on a CPU), or None where it cannot
    be had: then PyTorch's operations say the same."""
    usable = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if name in _refused or not usable or importlib.util.find_spec("triton") is None:
        return None
    try:
        return program()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # compilers, drivers and limits of a chip fail in many ways
        if device_failed(error):  # nothing else can be tried on it
            raise
        _refused.add(name)
        warn(f"the program for {name} does not run here", error)
        return None


def warn(what: str, error: Exception) -> None:
    """Say in the log that the slower way is taken, and why."""
    why = (str(error).splitlines() or [type(error).__name__])[0]
    _log.warning("%s (%s); the slower way is taken", what, why)


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
