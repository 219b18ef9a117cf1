"""Stores: one small protocol, a local directory, an in-memory object store, a recorder around either."""
