"""Other checkpoint libraries, at their best settings, and ckptfmt among them, for the neutral part of the suite."""
