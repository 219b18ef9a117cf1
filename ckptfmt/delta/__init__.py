"""What a delta stores of each block, and the processes that encode blocks beside a saver."""
