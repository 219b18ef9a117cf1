"""The saver: hashes, writes and commits saves, and deletes old ones, while the training goes on."""
