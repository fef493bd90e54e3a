"""Recipes of the available algorithms, by name."""

from __future__ import annotations

from nemo_kto.algorithms.recipes.dpo_recipe import DPO
from nemo_kto.algorithms.recipes.kto_recipe import KTO
from nemo_kto.algorithms.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (KTO, DPO)}
