"""Pure functions on boxes of tensors: merge of parts, tiling check, placements, read plans."""
