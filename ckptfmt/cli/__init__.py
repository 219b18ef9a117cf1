"""The command line.

`commands` and `arguments` define the accepted arguments. The other modules implement commands, or
are shared by several commands. A command imports only the modules that it needs, so that no
command slows down the start of another.
"""
