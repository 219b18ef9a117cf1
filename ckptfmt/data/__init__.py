"""The order in which a run reads data, and the digest of the samples read so far."""
