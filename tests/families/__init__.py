"""Test models of every family, in a file for each file of nemo_kto/architecture/families.

The matrices of tests (parity, gradients, adapters, shared prompts, activations) iterate over them, so that a new family
adds one file here.
"""

from __future__ import annotations

import importlib
import pkgutil

from tests.families.family import FamilyTests

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_TESTS: list[FamilyTests] = [module.TESTS for module in _MODULES if hasattr(module, "TESTS")]
TINY = {name: fields for tests in _TESTS for name, fields in tests.tiny.items()}
MODELS = {name: model for tests in _TESTS for name, model in tests.models.items()}
GRADIENTS = {name: step for tests in _TESTS for name, step in tests.gradients.items()}
SHARED_PROMPTS = {name: case for tests in _TESTS for name, case in tests.shared_prompts.items()}
WIDE = {name: changes for tests in _TESTS for name, changes in tests.wide.items()}
ACTIVATIONS = [case for tests in _TESTS for case in tests.activations]
TRAJECTORIES = {name: changes for tests in _TESTS for name, changes in tests.trajectories.items()}
DENSE, MIXTURES, IMAGES = (
    {name: model for name, model in MODELS.items() if model.kind == kind} for kind in ("dense", "mixture", "images")
)
