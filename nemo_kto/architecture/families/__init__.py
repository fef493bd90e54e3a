"""Tables of the model families. A new family is an object of the class ``Family`` in a file of this folder."""

from __future__ import annotations

import importlib
import pkgutil

from nemo_kto.architecture.family import ExpertFields, Family

__all__ = ["ALIASES", "FAMILIES", "MULTIMODAL", "WITH_CODE", "ExpertFields", "Family"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_ROWS = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Family)]
_FOUND = sorted({family.hf_architecture + family.text_type: family for family in _ROWS}.values(), key=lambda row: row.name)
FAMILIES = {family.hf_architecture: family for family in _FOUND if not family.text_type}
# model types that transformers does not have -> those that it has for the same weights
ALIASES = {alias: family.name for family in FAMILIES.values() for alias in family.aliases if not family.config_type}
_NAMED = {family.name: family for family in FAMILIES.values()}
# model types whose class is code beside the weights; some have the weights of a family that transformers has
WITH_CODE = {kind for family in FAMILIES.values() if family.config_type for kind in (family.name, *family.aliases)}
ALIASES |= {
    name: family.config_type
    for name, family in _NAMED.items()
    if family.config_type in _NAMED and family.mappings == _NAMED[family.config_type].mappings
}
MULTIMODAL = [family for family in _FOUND if family.text_type]  # with image input; an architecture may have several
