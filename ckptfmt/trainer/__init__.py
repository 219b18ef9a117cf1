"""The trainer's side of saves and loads: agreement, capture, copies, messages, and comparisons."""
