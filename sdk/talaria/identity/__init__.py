"""Who is who: keys, passwords and certificates of devices and coordinator, and how a device asks to be let in.

Stands on the wire; knows no fleet and keeps no list.
"""
