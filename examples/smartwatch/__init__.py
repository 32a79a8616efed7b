"""The demo: what smartwatch wearers get from learning together."""
