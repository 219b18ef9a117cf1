"""Boxes of tensors: who holds what, what tiles what, which bytes to read. Pure."""
