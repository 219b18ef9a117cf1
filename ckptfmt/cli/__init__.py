"""The command line.

`commands` and `arguments` define the accepted arguments. Each further module implements a command,
or is shared by several commands. A command imports only the modules needed for its work: the
modules of a command must not slow down the start of another.
"""
