"""Compose the configuration files of all algorithms when imported: processes forked afterwards need not."""

from __future__ import annotations

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config.compose import our_source

for recipe in RECIPES.values():
    for files in ([], ["hardware=cpu"]):
        our_source(recipe).compose(files)
