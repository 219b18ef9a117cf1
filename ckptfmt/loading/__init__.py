"""Loads into live objects, the claim of a load, and the first state of a run."""
