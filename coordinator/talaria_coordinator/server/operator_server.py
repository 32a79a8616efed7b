"""The operator's side of a running coordinator: metrics, API and dashboard, where its settings ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from talaria.identity.credentials import password_in
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.service import Report
from talaria_coordinator.server.open_state import write_url


class Desk:
    """What the service tells goes through here; :meth:`open` begins to serve it. Without ``[api]`` it only passes the
    journal on."""

    def __init__(self, config: FleetConfig, report: Report, stack: ExitStack, insecure: bool) -> None:
        self._config, self._report, self._stack = config, report, stack
        if config.api is None:
            return
        from talaria_coordinator.web.metrics import Metrics
        from talaria_coordinator.web.queries import Views
        from talaria_coordinator.web.server import listening

        self._token = config.api.token(insecure)
        self._sock = stack.enter_context(listening(config.api))
        self._views = Views(config.database, password_in(config.store.password_file))
        stack.callback(self._views.close)
        self._metrics = Metrics(config.name, self._views, config.state, config.identity)

    def report(self, event: dict[str, Any]) -> None:
        """Tell the journal, and count."""
        self._report(event)
        if self._config.api is not None:
            self._metrics.tell(event)
            self._views.tell(self._config.name, event)

    def observe(self, item: object) -> None:
        """An event or action of the protocol machine."""
        if self._config.api is not None:
            self._metrics.observe(item)

    def sent(self, size: int) -> None:
        """Bytes went out."""
        if self._config.api is not None:
            self._metrics.sent(size)

    def open(self, give: Callable[[Order], None]) -> Mapping[str, str]:
        """Begin to answer, with the store made; orders are handed to ``give``, in any thread. Says at which URL."""
        api = self._config.api
        if api is None:
            return {}
        from talaria_coordinator.web.api import make_api
        from talaria_coordinator.web.server import serving, url_of

        app = make_api(
            self._views, token=self._token, local=api.local, give={self._config.name: give}, metrics=self._metrics.text
        )
        self._stack.enter_context(serving(app, api, self._sock))
        url = url_of(api, self._sock)
        write_url(self._config.state, "api.url", url)
        return {"api": url}


@contextmanager
def desk_of(config: FleetConfig, report: Report, insecure: bool = False) -> Iterator[Desk]:
    """A desk whose port is already taken for it. Raises :class:`~talaria.errors.ConfigError` where the port cannot be
    had, or strangers could get in."""
    with ExitStack() as stack:
        yield Desk(config, report, stack, insecure)
