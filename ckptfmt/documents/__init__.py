"""Documents: bytes in, frozen objects out. Pure: no file, clock, network or torch."""
