"""The generator of the vectors: whole small checkpoints made from the spec alone, without the library they judge."""
