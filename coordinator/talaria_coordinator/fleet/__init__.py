"""One fleet that is served: its rounds, devices, uploads and aggregation.

Joins the protocol machine, the link, the store and the learning; one asyncio task owns its state.
"""
