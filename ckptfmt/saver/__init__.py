"""The saver: beside the training it hashes, writes, commits and lets go."""
