"""The write side of a save: image, staging into a slot, shards and part of one writer."""
