"""The personal model becomes a file in force, where it is better than what runs."""
