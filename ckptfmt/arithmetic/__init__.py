"""Arithmetic on boxes: who holds what, what tiles what, which bytes to read. Pure."""
