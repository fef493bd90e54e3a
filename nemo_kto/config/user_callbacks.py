"""User-defined callbacks, named in ``trainer.callbacks`` by their dotted paths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

from hydra.utils import instantiate

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.errors import UserError, import_object


def find_callback(spec: str | Mapping[str, object]) -> Callable[[], Callback]:
    """Return a factory for the callback that ``spec`` names.

    Args:
        spec: the path package.module.NAME, or a mapping with this path under _target_ and with keyword arguments.

    Raises:
        UserError: If the class does not exist, is not a Callback, or does not accept these arguments.
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
