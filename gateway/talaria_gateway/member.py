""":class:`SiteMember`: what the fleet above takes for a device that learns. It lets the site learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from talaria.errors import ConfigError
from talaria.privacy.in_process import Contribution
from talaria.privacy.terms import Terms
from talaria.tensors import Tensors
from talaria_coordinator.fleet.above import Above, Wanted
from talaria_edge.agent.training import Learner
from talaria_edge.storage.state import Private


@dataclass(frozen=True)
class SiteMember(Learner):
    """A :class:`~talaria_edge.agent.training.Learner` whose update is the partial sum of a site, and whose private
    state is empty. An update that is made lies on flash, and is sent again after a crash, as any device's."""

    above: Above = field(kw_only=True)
    left_s: Callable[[], float | None] = field(kw_only=True)
    """Seconds that the round at work leaves."""

    def __post_init__(self) -> None:
        """It needs nothing to learn with."""

    def _trained(self, round: int, model_digest: bytes, own: Tensors | None) -> tuple[bytes, Tensors, dict[str, float]]:
        return self.above.ask(Wanted(round, self.model(model_digest), self.left_s())), {}, {}

    def _own(self, private: Private | None, model_digest: bytes) -> Tensors | None:
        """None: it keeps nothing, so that there is nothing to carry over from a run before."""

    def contribution(self, model_digest: bytes, update: bytes, terms: Terms) -> Contribution:
        """Raises :class:`~talaria.errors.ConfigError`: no secure round takes a partial sum."""
        raise ConfigError("a gateway takes no part in secure rounds")

    def keeps(self, last: bool = False) -> bytes:
        """Its devices need all of the global model, each its part."""
        return b""

    def finish(self, model_digest: bytes) -> dict[str, Any]:
        """Hand the final global model to the site. Until that has it, nobody above may take this member for done."""
        self.above.ask(Wanted(self.run.rounds + 1, self.model(model_digest), final=True))
        return {"rounds": self.run.rounds}
