"""The fuzzer itself needs a package that no test needs."""

collect_ignore = ["guided.py"]
