"""Test models of every family, in a file for each file of nemo_kto/architecture/families.

The matrices of tests (parity, gradients, adapters, shared prompts, activations) iterate over them, so that a new family
adds one file here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import TypeVar

from tests.families.family import FamilyTests

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_TESTS: list[FamilyTests] = [module.TESTS for module in _MODULES if hasattr(module, "TESTS")]
Case = TypeVar("Case")


def _joined(tables: Iterable[Mapping[str, Case]]) -> dict[str, Case]:
    """Join the tables of all files; an error for a name that two files have, as one of the cases would be lost."""
    found: dict[str, Case] = {}
    for table in tables:
        assert not found.keys() & table, sorted(found.keys() & table)
        found |= table
    return found


TINY = _joined(tests.tiny for tests in _TESTS)
MODELS = _joined(tests.models for tests in _TESTS)
GRADIENTS = _joined(tests.gradients for tests in _TESTS)
SHARED_PROMPTS = _joined(tests.shared_prompts for tests in _TESTS)
WIDE = _joined(tests.wide for tests in _TESTS)
ACTIVATIONS = [case for tests in _TESTS for case in tests.activations]
TRAJECTORIES = _joined(tests.trajectories for tests in _TESTS)
DENSE, MIXTURES, IMAGES = (
    {name: model for name, model in MODELS.items() if model.kind == kind} for kind in ("dense", "mixture", "images")
)
