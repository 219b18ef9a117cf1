"""What one writer holds: laid out as the image of a slot, copied there, written as shards and a part."""
