"""Conversion between checkpoints of ckptfmt, torch.save, torch's DCP and Hugging Face.

A source of any kind becomes a `Content`, the contents of a checkpoint; a target of any kind is
written from a `Content`. Tensors pass in chunks: only a few chunks are in memory, whatever the size
of the checkpoint.
"""
