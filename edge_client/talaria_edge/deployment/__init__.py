"""Deployment of the personal model: it replaces the model in force where it does better."""
