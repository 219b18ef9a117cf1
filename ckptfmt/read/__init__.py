"""Open a checkpoint, read of it what is asked for, verify all of it, compare two."""
