"""``manyhands recipes``: what can be trained by name."""

from __future__ import annotations

from manyhands import recipes as registry
from manyhands.commands.options import DEFAULT_OUTPUT, Output
from manyhands.commands.output import print_json, say

__all__ = ["recipes"]


def recipes(*, output: Output = DEFAULT_OUTPUT) -> int:
    """List the built-in recipes and their settings."""
    found = [registry.get(name) for name in registry.names()]
    if not output.quiet:
        width = max(len(recipe.name) for recipe in found)
        for recipe in found:
            settings = {"epochs": recipe.epochs, "batch_size": recipe.batch_size, **recipe.options}
            say(f"{recipe.name:<{width}}  {recipe.description}")
            say(f"{'':<{width}}  --set {' '.join(f'{key}={value}' for key, value in settings.items())}")
        say()
        say("Or a .py file that defines recipe(): manyhands train my_recipe.py")
    if output.json:
        listed = [
            {
                "name": recipe.name,
                "description": recipe.description,
                "epochs": recipe.epochs,
                "batch_size": recipe.batch_size,
                "settings": recipe.options,
            }
            for recipe in found
        ]
        print_json({"recipes": listed})
    return 0
