"""Peers of the neutral part: ckptfmt and other checkpoint libraries, with the best settings."""
