"""The user's own callbacks: ``trainer.callbacks`` names them by their dotted paths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

from hydra.utils import instantiate

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.errors import UserError, import_object


def find_callback(spec: str | Mapping[str, object]) -> Callable[[], Callback]:
    """What makes the callback of package.module.NAME, or of a mapping with that under _target_ and keyword arguments.

    Raises:
        UserError: there is no such class, it is no Callback, or it does not take these arguments.
    """
    settings = {"_target_": spec} if isinstance(spec, str) else dict(spec)
    path, arguments = str(settings.get("_target_")), {name: settings[name] for name in settings if not name.startswith("_")}
    found = import_object(path)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UserError(f"must name subclasses of {Callback.__module__}.{Callback.__name__}, got {path}")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise UserError(f"must have the arguments that {path} takes, got {arguments}: {error}") from error
    return partial(instantiate, settings)
