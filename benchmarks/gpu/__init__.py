"""GPU checks in under ten minutes: ``python -m benchmarks.gpu --out DIRECTORY``, or ``gpu.sh``."""
