"""The operator's API over HTTP: what the coordinator knows, and the orders it takes. Described at ``/openapi.json``.

Everything is read through :class:`~talaria_coordinator.web.queries.Views`, so that no request holds up the learning;
orders are put in the coordinator's own line. The core never needs this: a fleet learns without it.
"""

import asyncio
import hmac
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from talaria.errors import ConfigError, StateError
from talaria.wire.broker_url import loopback
from talaria.wire.topics import DEVICE_NAME, FLEET_NAME
from talaria_coordinator.fleet.operator_commands import Order, Verb
from talaria_coordinator.web.queries import Views
from talaria_coordinator.web.schemas import (
    AttemptDetail,
    AttemptView,
    DeviceView,
    EventView,
    FleetView,
    Outcome,
    OverlapView,
    UpdateView,
)

ANSWER_S = 50.0
"""Seconds that an order may take: fewer than a connection has for an answer, so that this one comes too."""
LARGEST_BODY = 4096
OPEN_PATHS = {"/", "/healthz", "/dashboard/app.js", "/dashboard/style.css"}
PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/dashboard/style.css": ("style.css", "text/css; charset=utf-8"),
}
HEADERS = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
     b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)  # fmt: skip

Give = Callable[[Order], None]
FleetName = Annotated[str, Path(pattern=f"^{FLEET_NAME}$", description="The fleet's name.")]
DeviceName = Annotated[str, Path(pattern=f"^{DEVICE_NAME}$", description="The device's name.")]
Number = Annotated[int, Path(ge=0, le=2**31 - 1, description="The attempt's number.")]
Before = Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Only what is numbered below this.")]
After = Annotated[str, Query(pattern=f"^({DEVICE_NAME})?$", description="Only devices named after this one.")]
Limit = Annotated[int, Query(ge=1, le=500, description="How many at most.")]
Few = Annotated[int, Query(ge=1, le=48, description="How many devices at most.")]
More = Annotated[int, Query(ge=1, le=2**31 - 1, description="How many rounds more.")]
Classes = Annotated[int, Query(ge=0, le=2**16, description="How many classes the head has then; 0: as many.")]
Reason = Annotated[str, Query(max_length=200, description="Why; it stands in the log.")]


class Problem(BaseModel):
    """Why a request was not carried out."""

    detail: str


NOT_IN: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No token, or a wrong one."},
    403: {"model": Problem, "description": "The request came through a foreign web page."},
    422: {"model": Problem, "description": "A parameter is out of bounds."},
    503: {"model": Problem, "description": "The store or the coordinator does not answer now."},
}
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "There is no such thing."}}
CONFLICT: dict[int | str, dict[str, Any]] = {409: {"model": Problem, "description": "It does not fit what is."}}


def make_api(
    views: Views,
    *,
    token: str | None = None,
    local: bool = True,
    give: Mapping[str, Give] | None = None,
    metrics: Callable[[], bytes] = lambda: b"",
) -> ASGIApp:
    """The whole application. ``give`` puts an order in the line of a fleet that is served here; ``local`` says that
    only this machine reaches it, ``token`` is what requests must show, if anything."""
    app = FastAPI(
        title="Talaria coordinator",
        version="1",
        description="What a fleet's coordinator knows, and the orders it takes. With a token file, every request "
        "carries `Authorization: Bearer <token>`.",
        docs_url=None,
        redoc_url=None,
        responses=NOT_IN,
        redirect_slashes=False,
        dependencies=[] if token is None else [_shown()],
    )
    _reading(app, views)
    _orders(app, views, give or {})

    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response)
    def read_metrics() -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/healthz", summary="Whether the coordinator's web server is up")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    for path, (file, kind) in PAGES.items():
        app.add_api_route(path, _page(file, kind), include_in_schema=False)
    app.add_exception_handler(StateError, _busy)
    app.add_exception_handler(RequestValidationError, _unfit)
    # A watchdog needs no token; the description says so.
    app.openapi()["paths"]["/healthz"]["get"].pop("security", None)
    return Guard(app, token, local)


def _shown() -> Any:
    from fastapi import Depends

    # The guard below decides; this one makes the description say so.
    return Depends(HTTPBearer(auto_error=False))


def _reading(app: FastAPI, views: Views) -> None:
    def known(fleet: str) -> FleetView:
        found = views.fleet(fleet)
        if found is None:
            raise _no_fleet(fleet)
        return found

    def known_device(fleet: str, device: str) -> DeviceView:
        found = views.device(fleet, device)
        if found is None:
            raise HTTPException(404, f"fleet {fleet!r} has no device {device!r}")
        return found

    @app.get("/api/v1/fleets", summary="All fleets")
    def fleets() -> list[FleetView]:
        return views.fleets()

    @app.get("/api/v1/fleets/{fleet}", summary="One fleet", responses=NOT_FOUND)
    def fleet(fleet: FleetName) -> FleetView:
        return known(fleet)

    @app.get(
        "/api/v1/fleets/{fleet}/attempts", summary="The last attempts at rounds, newest first", responses=NOT_FOUND
    )
    def attempts(fleet: FleetName, before: Before = None, limit: Limit = 50) -> list[AttemptView]:
        known(fleet)
        return views.attempts(fleet, before, limit)

    @app.get("/api/v1/fleets/{fleet}/attempts/{number}", summary="An attempt and its updates", responses=NOT_FOUND)
    def attempt(fleet: FleetName, number: Number, after: After = "", limit: Limit = 200) -> AttemptDetail:
        found = views.attempt(fleet, number, after, limit)
        if found is None:
            raise HTTPException(404, f"fleet {fleet!r} has no attempt {number}")
        return found

    @app.get("/api/v1/fleets/{fleet}/attempts/{number}/overlap", summary="How far the masks agree", responses=NOT_FOUND)
    def overlap(fleet: FleetName, number: Number, limit: Few = 24) -> OverlapView:
        known(fleet)
        return views.overlap(fleet, number, limit)

    @app.get("/api/v1/fleets/{fleet}/devices", summary="Devices by name", responses=NOT_FOUND)
    def devices(fleet: FleetName, after: After = "", limit: Limit = 200) -> list[DeviceView]:
        known(fleet)
        return views.devices(fleet, after, limit)

    @app.get("/api/v1/fleets/{fleet}/devices/{device}", summary="One device", responses=NOT_FOUND)
    def device(fleet: FleetName, device: DeviceName) -> DeviceView:
        return known_device(fleet, device)

    @app.get("/api/v1/fleets/{fleet}/devices/{device}/updates", summary="A device's last updates", responses=NOT_FOUND)
    def updates(fleet: FleetName, device: DeviceName, limit: Limit = 50) -> list[UpdateView]:
        known_device(fleet, device)
        return views.device_updates(fleet, device, limit)

    @app.get("/api/v1/fleets/{fleet}/quarantine", summary="Devices that are shut out, and why", responses=NOT_FOUND)
    def quarantine(fleet: FleetName, after: After = "", limit: Limit = 200) -> list[DeviceView]:
        known(fleet)
        return views.devices(fleet, after, limit, quarantined=True)

    @app.get("/api/v1/fleets/{fleet}/events", summary="The audit log, newest first", responses=NOT_FOUND)
    def events(fleet: FleetName, before: Before = None, limit: Limit = 100) -> list[EventView]:
        known(fleet)
        return views.events(fleet, before, limit)


def _orders(app: FastAPI, views: Views, give: Mapping[str, Give]) -> None:
    async def carry_out(fleet: str, order: Order) -> Outcome:
        if fleet not in give:
            if await asyncio.to_thread(views.fleet, fleet) is None:
                raise _no_fleet(fleet)
            raise HTTPException(409, f"fleet {fleet!r} is not served by this coordinator; ask the one that serves it")
        give[fleet](order)
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await asyncio.shield(asyncio.wrap_future(order.answer))
        except ConfigError as error:
            raise HTTPException(409, str(error)) from None
        except TimeoutError:
            raise HTTPException(503, f"the coordinator did not answer within {ANSWER_S:g} s; look at its log") from None
        return Outcome(fleet, status)

    def about_fleet(verb: Verb) -> Callable[..., Any]:
        async def endpoint(fleet: FleetName, reason: Reason = "") -> Outcome:
            return await carry_out(fleet, Order(verb, reason=reason))

        return endpoint

    def about_device(verb: Verb) -> Callable[..., Any]:
        async def endpoint(fleet: FleetName, device: DeviceName, reason: Reason = "") -> Outcome:
            return await carry_out(fleet, Order(verb, device, reason))

        return endpoint

    told: dict[Verb, str] = {
        "pause": "Open no further round; the open one runs to its end",
        "resume": "Go on from the last committed model",
        "abort": "Call the open round off, and open no further one",
    }
    for verb, summary in told.items():
        app.post(f"/api/v1/fleets/{{fleet}}/{verb}", summary=summary, name=verb, responses=NOT_FOUND | CONFLICT)(
            about_fleet(verb)
        )

    @app.post(
        "/api/v1/fleets/{fleet}/extend", summary="Let the run go on for more rounds", responses=NOT_FOUND | CONFLICT
    )
    async def extend(fleet: FleetName, rounds: More, reason: Reason = "") -> Outcome:
        return await carry_out(fleet, Order("extend", reason=reason, rounds=rounds))

    @app.post(
        "/api/v1/fleets/{fleet}/next",
        summary="Begin another run of the same model from what was learned, with as many classes or more",
        responses=NOT_FOUND | CONFLICT,
    )
    async def next_run(fleet: FleetName, rounds: More, classes: Classes = 0, reason: Reason = "") -> Outcome:
        return await carry_out(fleet, Order("next", reason=reason, rounds=rounds, classes=classes))

    shut: dict[Verb, str] = {
        "quarantine": "Shut a device out",
        "release": "Let a device in again",
        "retire": "Let a device leave for good",
        "readmit": "Take a device in again that left",
    }
    for verb, summary in shut.items():
        path = f"/api/v1/fleets/{{fleet}}/devices/{{device}}/{verb}"
        app.post(path, summary=summary, name=verb, responses=NOT_FOUND | CONFLICT)(about_device(verb))


def _no_fleet(fleet: str) -> HTTPException:
    return HTTPException(404, f"no fleet {fleet!r} here; see /api/v1/fleets")


def _page(file: str, kind: str) -> Callable[[], Response]:
    content = (resources.files("talaria_coordinator") / "web" / "dashboard" / file).read_bytes()
    return lambda: Response(content, media_type=kind)


def _busy(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 503)


def _unfit(_: Request, error: Exception) -> Response:
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    where = ".".join(str(part) for part in first.get("loc", ())[1:])
    return JSONResponse({"detail": f"{where}: {first.get('msg', 'is not right')}"[:400]}, 422)


class Guard:
    """Stands before the application: token, foreign web pages, large bodies; and the headers of every answer.

    A page of another origin can make a browser on this machine send requests to 127.0.0.1. It is refused by its
    ``Origin``; where no token is asked for, also a name that somebody else points to this machine (``Host``).
    """

    def __init__(self, app: ASGIApp, token: str | None, local: bool) -> None:
        self._app, self._local = app, local
        self._wanted = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def dressed(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        refusal = self._refusal(scope, dict(scope["headers"]))
        if scope["method"] == "HEAD":  # as a watchdog may ask; the server sends no body then
            scope = {**scope, "method": "GET"}
        await (self._app if refusal is None else refusal)(scope, receive, dressed)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ASGIApp | None:
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._wanted is None and self._local and not loopback(name.strip("[]")):
            return _no(403, "the request names another host than this machine; use http://127.0.0.1")
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            mend = "open the dashboard itself, and let a proxy before it pass on the Host that it was asked for"
            return _no(403, f"the request comes from another web page; {mend}")
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit() or len(length) > 9 or int(length) > LARGEST_BODY:
            return _no(413, f"no request needs a body; this one is chunked or above {LARGEST_BODY} bytes")
        if self._wanted is None or scope["path"] in OPEN_PATHS:
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._wanted):
            return _no(401, "show the token: `Authorization: Bearer <token>`", {"www-authenticate": "Bearer"})
        return None


def _no(status: int, detail: str, headers: Mapping[str, str] | None = None) -> ASGIApp:
    return JSONResponse({"detail": detail}, status, headers)
