"""Saves: one save, saves in the background with slots and a saver, and replicas and mirrors."""
