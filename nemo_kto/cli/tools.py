"""Access of the core's commands to the tools in ``nemo_kto.tools``, each of which may be absent: the core imports none."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from nemo_kto.errors import UserError

_PACKAGE = "nemo_kto"


def is_present(module: str) -> bool:
    """Return whether a module of this package, such as tools.plan.auto, exists; it is not imported."""
    try:
        return importlib.util.find_spec(f"{_PACKAGE}.{module}") is not None
    except ModuleNotFoundError:  # the folder of a tool
        return False


def load(module: str) -> ModuleType:
    """Import a module of this package; UserError if a tool that it needs is absent."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if not missing.startswith(f"{_PACKAGE}.tools"):
            raise
        raise UserError(
            f"{missing} must be installed for this, but is missing; install the whole package nemo-kto"
        ) from error


def tool(name: str) -> ModuleType:
    """Return a module of nemo_kto.tools, such as "plan.auto"; UserError if its tool is absent."""
    return load(f"tools.{name}")
