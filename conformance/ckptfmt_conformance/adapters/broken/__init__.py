"""Adapters with one known fault each. `CONVICTED_BY` of each module names cases that must not pass with it."""
