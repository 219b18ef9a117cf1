"""Adapters that come with the suite: the reference, broken ones that it must convict, and peers of other formats."""
