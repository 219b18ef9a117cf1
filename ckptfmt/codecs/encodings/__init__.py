"""Encodings of a block: what its bytes become where they're stored, and back. Spec: page 55."""

from ckptfmt.codecs.encodings.registry import ENCODINGS, NEEDS_BASE, QUICK, choose, decode, encode

__all__ = ["ENCODINGS", "NEEDS_BASE", "QUICK", "choose", "decode", "encode"]
