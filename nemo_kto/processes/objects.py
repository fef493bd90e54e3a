"""Objects of the calling process in its ranks: losses and callbacks of a notebook or a script, and the search path."""

from __future__ import annotations

import os
import pickle  # nosec B403  # reads only what the process that started this rank has written
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from nemo_kto.errors import UserError
from nemo_kto.processes import ranks

MODULE = "python_session"  # module from which the configuration takes the objects, as if they were in a file


def register(objects: Mapping[str, object]) -> None:
    """Make the objects importable as python_session.NAME."""
    module = ModuleType(MODULE, "Objects that were passed to nemo_kto.train.")
    vars(module).update(objects)
    sys.modules[MODULE] = module


def pack(objects: Mapping[str, object]) -> bytes:
    """Return the search path and the objects for the ranks; raise UserError if an object cannot be pickled."""
    pickled = b""
    if objects:
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(dict(objects))
        except Exception as error:  # an object may raise anything
            text = f"loss and callbacks must be picklable, because the ranks are other processes, got {', '.join(objects)}"
            raise UserError(f"{text}: {type(error).__name__}: {error}") from error
    return pickle.dumps(([os.path.abspath(folder) for folder in sys.path], pickled))


def unpack() -> None:
    """In a rank: search modules where the process that started it does, after the rank's own places, and get its objects."""
    if (file := os.environ.get(ranks.OBJECTS_FILE)) is None:
        return
    folders, pickled = pickle.loads(Path(file).read_bytes())  # nosec B301
    sys.path += [folder for folder in folders if folder not in sys.path]
    if pickled:
        try:
            register(pickle.loads(pickled))  # nosec B301
        except Exception as error:  # user code may raise anything
            text = "loss and callbacks must be usable in the ranks, which are other processes"
            raise UserError(f"{text}, got {type(error).__name__}: {error}; import what they need inside of them") from error
