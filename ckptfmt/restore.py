"""Placeholder until the real module lands."""
class LoadReport: pass
def restore(*a, **k): raise NotImplementedError
def restore_streams(*a, **k): raise NotImplementedError
def load_trees(*a, **k): raise NotImplementedError
