"""A gateway: the coordinator of a site that is one member of the fleet above, and forwards one weighted partial sum for
all its devices. It joins coordinator and agent, and no other program imports it.
"""
