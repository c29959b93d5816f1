"""Knowing before and after: what workers buy."""
