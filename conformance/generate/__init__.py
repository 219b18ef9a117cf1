"""The generator of the vectors: checkpoints made from the specification, without the library."""
