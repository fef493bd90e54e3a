"""nemo_kto: alignment on feedback, with or without pairs, at Megatron scale.

``nemo_kto.train`` trains a model and returns a ``nemo_kto.Run``; mistakes of the user are raised as ``nemo_kto.UserError``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_kto.cli.api import Run, train
    from nemo_kto.errors import UserError

__version__ = "0.1.0"
__all__ = ["Run", "UserError", "train"]


def __getattr__(name: str) -> object:
    if name in __all__:  # imported when first used: the command line needs none of them
        return getattr(importlib.import_module("nemo_kto.errors" if name == "UserError" else "nemo_kto.cli.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
