"""One run as a value, and what it is known by."""

from __future__ import annotations

from dpscaffold.setting.run import Setting

__all__ = ["Setting"]
