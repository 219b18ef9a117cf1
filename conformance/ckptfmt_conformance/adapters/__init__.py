"""Adapters that come with the suite: the reference, broken adapters to convict, and peers."""
