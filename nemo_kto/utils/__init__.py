"""Helpers of all packages; here: lazy imports."""

from __future__ import annotations

import importlib
from types import ModuleType


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_import(name: str) -> ModuleType:
    """Return a stand-in for a module that imports it when one of its attributes is first read.

    Used for torch, which takes seconds to import, in modules that are also loaded just to check a command line.
    """
    return _LazyModule(name)
