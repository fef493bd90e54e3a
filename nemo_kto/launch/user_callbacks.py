"""The user's own callbacks: ``trainer.callbacks`` names them by their dotted paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra.utils import instantiate

from nemo_kto.algorithms.callbacks import Callback
from nemo_kto.errors import UserError, import_object

Spec = str | Mapping[str, object]
"""package.module.NAME, or a mapping with that under _target_ and keyword arguments, as Hydra instantiates it."""


def callback_class(spec: Spec) -> type[Callback]:
    """The class that an entry of ``trainer.callbacks`` names.

    Raises:
        UserError: there is none, or it is no Callback.
    """
    path = spec if isinstance(spec, str) else str(spec.get("_target_"))
    found = import_object(path)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UserError(f"must name subclasses of {Callback.__module__}.{Callback.__name__}, got {path}")
    return found


def build_user_callbacks(specs: Sequence[Spec]) -> list[Callback]:
    """One of each.

    Raises:
        UserError: see :func:`callback_class`; or its arguments do not fit.
    """
    callbacks = []
    for spec in specs:
        kind = callback_class(spec)
        try:
            callbacks.append(kind() if isinstance(spec, str) else instantiate(dict(spec)))
        except Exception as error:  # the class is the user's
            raise UserError(f"trainer.callbacks: {spec} cannot be made; {type(error).__name__}: {error}") from error
    return callbacks
