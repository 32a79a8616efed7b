"""Rules that stand some lying devices: median, trimmed mean, Krum, geometric median, centered clipping, bucketing.

Each is an aggregator; all but bucketing read the updates as rows of one table.
"""
