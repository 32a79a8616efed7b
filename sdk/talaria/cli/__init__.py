"""The ``talaria`` command and the subcommands of the sdk; the programs add their own by entry point.

A command reads its words, calls one function of another room, and prints what it gives.
"""
