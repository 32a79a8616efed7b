"""fx as one thread of several may use it."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from torch import fx
from torch.nn import Module

from talaria.seeds import ALONE


class Follower(fx.Tracer):
    """Follows a module in this thread alone. Meanwhile fx has itself in the place of every module's call, in the whole
    process: what another thread calls then, such as an app's own network, is called as ever. No two follow at once, as
    the later one would put the earlier one back at its end."""

    _here = 0

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """As fx follows it."""
        with ALONE:
            self._here = get_ident()
            return super().trace(root, concrete_args)

    @property
    def elsewhere(self) -> bool:
        """Whether a thread asks that follows nothing."""
        return get_ident() != self._here

    def call_module(self, m: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As fx follows it."""
        return forward(*args, **kwargs) if self.elsewhere else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """As fx follows it."""
        return attr_val if self.elsewhere else super().getattr(attr, attr_val, parameter_proxy_cache)
