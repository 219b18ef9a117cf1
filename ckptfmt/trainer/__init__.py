"""The trainer's half of saves and loads: agree, capture, copy, talk to the saver; plan, fill, compare."""
