"""The two halves of a round as machines without input or output: ``(state, event) -> (state, actions)``."""
