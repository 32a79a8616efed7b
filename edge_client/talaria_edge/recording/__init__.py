"""A folder of windows that fills while the device lives: what is kept, labels that come later, and drift."""
