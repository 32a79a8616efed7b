"""Benchmarks of a whole fleet over a real broker: what it survives, and what it carries."""
