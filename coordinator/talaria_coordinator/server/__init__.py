"""A whole coordinator in one process: opens its state, starts broker and operator's server, serves each fleet.

The only room that starts and ends the others.
"""
