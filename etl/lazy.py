"""Modules that are imported when they are first used: most runs never use them, and some take long to import."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands for a module until an attribute of it is asked for.

    Use it beside an import that only type checkers see::

        if TYPE_CHECKING:
            import polars as pl
        else:
            pl = LazyModule("polars")

    Args:
        name: The module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # Python's own importlib.util.LazyLoader would put its stand-in into sys.modules, before everybody's eyes.
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value
