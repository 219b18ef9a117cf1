"""What saving, loading and planning cost, measured beside their peers: ``python -m benchmarks save`` and its like."""
