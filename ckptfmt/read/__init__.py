"""Open a checkpoint, read selected contents, verify every byte, compare two checkpoints."""
