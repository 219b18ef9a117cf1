"""The order in which a run sees its data, and the digest of the samples that it has seen."""
