"""Measurements of the system's parts, and of the whole; ``launch/benchmark.py`` is their program."""
