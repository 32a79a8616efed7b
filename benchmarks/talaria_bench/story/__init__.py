"""A fleet that lives for a year, told in a few minutes."""
