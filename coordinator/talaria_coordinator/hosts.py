"""Which hosts are this machine alone: the rule that devices go by as well."""

from talaria.wire.address import loopback

__all__ = ["loopback"]
