"""Peers of the neutral part: ckptfmt and other checkpoint libraries, with their best settings."""
