"""Decide: the parts of an attempt become a checkpoint, or it is given up."""
