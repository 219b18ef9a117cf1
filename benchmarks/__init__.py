"""What saving costs, measured beside its peers: ``python -m benchmarks save`` and ``python -m benchmarks stall``."""
