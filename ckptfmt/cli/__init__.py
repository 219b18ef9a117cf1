"""The command line: `commands` and `arguments` say what may be typed; the others are commands, or what they share.

Each module imports what it needs where it needs it: none of them may cost the start of another.
"""
