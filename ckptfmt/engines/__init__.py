"""Engines: write, commit, read, verify, follow the lineage, retire. They know stores and documents, never torch."""
