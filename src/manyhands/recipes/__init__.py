"""Recipes: whole training jobs by name, and the door through which a user's own file becomes one."""

from manyhands.recipes.registry import Recipe, RecipeData, get, names, with_settings

__all__ = ["Recipe", "RecipeData", "get", "names", "with_settings"]
