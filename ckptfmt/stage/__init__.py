"""Staging: memory that a trainer fills and the process that writes reads, and how much of it there may be."""
