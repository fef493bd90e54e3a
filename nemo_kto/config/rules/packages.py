"""Packages of others that may be installed in a way that does not work."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

from nemo_kto.device import device
from nemo_kto.errors import UserError


def check_transformer_engine() -> None:
    """Import Transformer Engine, which is optional, before megatron-core does and fails with a traceback; not on the CPU.

    megatron-core takes its own layers where there is an ImportError. The package raises other errors where it is the empty
    shell that `pip install transformer-engine` gives, or where its parts have different versions.

    Raises:
        UserError: it is installed and cannot be imported.
    """
    if not device.on_gpu():
        return
    try:
        importlib.import_module("transformer_engine")
    except ImportError:
        return
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).strip().split('. ')[0]}"
        raise UserError(
            f"Transformer Engine must be complete or absent, got a package that cannot be imported ({found}); remove it "
            "with pip uninstall transformer-engine, or install what fits this torch: "
            "pip install --no-build-isolation 'nemo-kto[gpu]' (docs/gpu/README.md)"
        ) from error


def transformer_engine_version() -> tuple[int, int] | None:
    """Of the Transformer Engine that is installed, such as (2, 9), without importing it; None where there is none."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None
