"""Deltas: the choice of full or delta, the coding of blocks, and the coder processes."""
