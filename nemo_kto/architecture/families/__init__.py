"""Tables of the model families. A new family is an object of the class ``Family`` in a file of this folder."""

from __future__ import annotations

import importlib
import pkgutil

from nemo_kto.architecture.family import ExpertFields, Experts, Family, Temperature

__all__ = ["FAMILIES", "ExpertFields", "Experts", "Family", "Temperature"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_FOUND = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Family)]
FAMILIES = {family.hf_architecture: family for family in sorted(_FOUND, key=lambda family: family.name)}
