"""How copies of the model agree."""
