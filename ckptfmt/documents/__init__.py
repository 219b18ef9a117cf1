"""Documents of the format: bytes to frozen objects and back.

Pure: no file, clock, network or torch.
"""
