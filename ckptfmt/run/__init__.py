"""The checkpoints of one run: launches and lineage, retention, compaction."""
