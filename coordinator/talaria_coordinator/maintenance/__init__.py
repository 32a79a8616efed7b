"""Care of a store: backup, restore, and a check of the whole.

Uses storage alone.
"""
