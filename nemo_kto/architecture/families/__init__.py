"""Tables of the model families. A new family is an object of the class ``Family`` in a file of this folder."""

from __future__ import annotations

import importlib
import pkgutil

from nemo_kto.architecture.family import ExpertFields, Family

__all__ = ["ALIASES", "FAMILIES", "MULTIMODAL", "ExpertFields", "Family"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_ROWS = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Family)]
_FOUND = sorted({family.hf_architecture + family.text_type: family for family in _ROWS}.values(), key=lambda row: row.name)
FAMILIES = {family.hf_architecture: family for family in _FOUND if not family.text_type}
ALIASES = {alias: family.name for family in FAMILIES.values() for alias in family.aliases}  # unknown to transformers
MULTIMODAL = [family for family in _FOUND if family.text_type]  # with image input; an architecture may have several
