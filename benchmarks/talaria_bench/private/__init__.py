"""What private rounds cost in accuracy: secure sums beside plain ones, and noise for a budget."""
