"""Costs of saving, loading and planning, with peers: ``python -m benchmarks save`` and so on."""
