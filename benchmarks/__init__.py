"""Measurements of manyhands against the tools a user would otherwise pick.

Each module is a command, run from the root of the repository: `python -m benchmarks.vs_ddp`.
"""
