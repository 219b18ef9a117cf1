"""The commit: an attempt's parts become a checkpoint, or the attempt is given up."""
