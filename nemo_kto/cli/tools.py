"""Access of the core's commands to the tools in ``nemo_kto.tools``, which the core does not import."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from nemo_kto.errors import UserError


def tool(name: str) -> ModuleType:
    """Return a module of nemo_kto.tools, such as "plan.auto"; raise UserError if its tool is not installed."""
    folder = f"nemo_kto.tools.{name.partition('.')[0]}"
    if importlib.util.find_spec(folder) is None:
        raise UserError(f"{folder} must be installed for this, but is missing; install the whole package nemo-kto")
    return importlib.import_module(f"nemo_kto.tools.{name}")
