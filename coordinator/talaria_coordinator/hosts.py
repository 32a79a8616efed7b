"""Which hosts are this machine alone, told without asking a name server."""

import ipaddress


def loopback(host: str) -> bool:
    """True where only this machine reaches what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
