"""The operator's API: what it shows, what it refuses, and that it never stands in the way of the learning."""

import re
import socket
import stat
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from talaria.config import Section
from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.spec import ModelSpec
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria.protocol.coordinator.state import Attempt, Peer
from talaria.types import Update
from talaria_coordinator.cli.status import read_status
from talaria_coordinator.cli.template import found as found_fleet
from talaria_coordinator.config.api import ApiConfig, api_of
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.operator_commands import Order, decide
from talaria_coordinator.server.operator_server import desk_of
from talaria_coordinator.storage import update_summary
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.store import Store
from talaria_coordinator.web.api import OPEN_PATHS, make_api
from talaria_coordinator.web.metrics import Metrics, class_of
from talaria_coordinator.web.queries import Views
from talaria_coordinator.web.server import listening, serving, url_of

A, B, C = "a" * 64, "b" * 64, "c" * 64
RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="hermes", rounds=3).to_json()
LAYOUT = ChannelLayout({"g": 8}, {"w": ((("g", 1),),)})
TOKEN = "correct-horse-battery-staple"
REASONS = {"finite", "signature", "replay", "quarantined", "size", "checksum", "shape", "late", "other"}
KEPT = {"anna": (0, 1, 2, 3), "bela": (2, 3, 4, 5), "carl": (0, 1, 2, 3)}


@contextmanager
def answering(app):
    """A client of a real server."""
    config = ApiConfig(port=0)
    with (
        listening(config) as sock,
        serving(app, config, sock),
        httpx.Client(base_url=url_of(config, sock), timeout=20) as client,
    ):
        yield client


def found(device, accuracy):
    mask = ChannelMask(LAYOUT, {"g": KEPT[device]})
    metrics = {"val_accuracy": accuracy}
    return update_summary.findings_of(Update({"w": np.zeros(4)}, 5.0, device, mask=mask, metrics=metrics), 400)


@pytest.fixture
def store(tmp_path):
    """One closed round of three devices, one that failed, an open one, and a device in quarantine."""
    store = Store(tmp_path / "coordinator.db")
    fleet = store.fleets.enter("watch", RUN, A, B)
    for device in ("anna", "bela", "carl", "dora"):
        store.devices.see("watch", Sight(device, 1, {}))
    store.devices.quarantine("watch", "dora", "<b>two different updates</b>")
    first = store.attempts.open("watch", 1, list(KEPT), A).attempt
    for device, accuracy in zip(KEPT, (0.5, 0.9, 0.6), strict=True):
        store.updates.keep("watch", first, device, digest=B, size=100, base_version=1, found=found(device, accuracy))
    store.updates.reject("watch", first, "dora", digest=C, size=7, base_version=1, reason="not finite")
    counted = [(first, device) for device in KEPT]
    bytes_ = {"down": 330, "dense": 400}
    store.attempts.commit(
        "watch", first, epoch=fleet.epoch, counted=counted, model_digest=C, server=A,
        means={"val_accuracy": 0.625}, **bytes_,
    )  # fmt: skip
    store.attempts.fail("watch", store.attempts.open("watch", 2, list(KEPT), C).attempt, "0 of at least 2 updates came")
    store.attempts.open("watch", 2, list(KEPT), C)
    yield store
    store.close()


@pytest.fixture
def views(store, tmp_path):
    views = Views(tmp_path / "coordinator.db")
    yield views
    views.close()


@pytest.fixture
def client(views):
    with answering(make_api(views)) as client:
        yield client


def got(client, path, status=200, **options):
    answer = client.get(path, **options)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_fleets_and_what_they_are_doing(client):
    (fleet,) = got(client, "/api/v1/fleets")
    assert fleet == got(client, "/api/v1/fleets/watch")
    facts = {k: fleet[k] for k in ("name", "status", "round", "rounds", "tried", "algorithm", "model", "devices")}
    assert facts == {
        "name": "watch", "status": "running", "round": 1, "rounds": 3, "tried": 3, "algorithm": "hermes",
        "model": "imu_cnn", "devices": 4,
    }  # fmt: skip
    assert (fleet["online"], fleet["quarantined"]) == (3, 1)


def test_what_keeps_a_coordinator_from_its_work_is_shown_until_it_is_over(store, tmp_path):
    """A store on a disk that is full holds no word of it, and the page showed a round that was open."""
    run = Run(spec=ModelSpec("mlp", (6,), 3), algorithm="fedavg")
    config = FleetConfig(name="watch", run=run, state=tmp_path, devices=4, api=ApiConfig(port=0))
    journal, full = [], "blobs: No space left on device; free space there"
    with desk_of(config, journal.append) as desk, httpx.Client(base_url=desk.open(lambda order: None)["api"]) as client:
        shown = []
        for event, facts in (
            ("error", {"error": full}), ("disconnected", {"error": "link lost"}), ("connected", {}),
            ("round-closed", {"attempt": 3, "at": 0.0}),
        ):  # fmt: skip
            desk.report({"event": event, **facts})
            shown.append(got(client, "/api/v1/fleets/watch")["trouble"])
    assert shown == [[full], [full, "link lost"], [full], []]
    assert len(journal) == 4


def test_bytes_of_a_version_are_of_the_updates_in_it_whenever_they_were_made(store, views, tmp_path):
    """Asynchronously all stood beside the attempt that had asked for them, and later ones had none."""
    epoch, late = store.fleets.get("watch").epoch, 3
    for device in KEPT:
        store.updates.keep("watch", late, device, digest=B, size=100, base_version=1, found=found(device, 0.5))
    commit = partial(store.attempts.commit, "watch", epoch=epoch, model_digest=C, server=A)
    commit(late, counted=[(late, "anna")], down=0, dense=400)
    next_ = store.attempts.open("watch", 3, list(KEPT), C).attempt
    commit(next_, counted=[(late, "bela"), (late, "carl")], down=0, dense=400)
    run = Run(spec=ModelSpec("mlp", (6,), 3), algorithm="fedavg")
    config = FleetConfig(name="watch", run=run, state=tmp_path, devices=4)
    told = {row["attempt"]: row["bytes_up"] for row in read_status(config)["history"]}
    for attempt, counted in ((late, 1), (next_, 2)):
        view = views.attempt("watch", attempt).summary
        assert (view.bytes_up, view.bytes_dense, view.accuracy.count) == (100 * counted, 400 * counted, counted)
        assert told[attempt] == 100 * counted
        assert len(views.overlap("watch", attempt).devices) == counted, "the masks are of those too"


def test_rounds_come_newest_first_with_accuracy_overlap_and_bytes(client):
    newest, failed, first = got(client, "/api/v1/fleets/watch/attempts")
    assert [r["state"] for r in (newest, failed, first)] == ["open", "failed", "closed"]
    assert failed["failure"] == "0 of at least 2 updates came"
    assert (first["counted"], first["rejected"]) == (3, 1)
    assert (first["bytes_up"], first["bytes_dense"]) == (300, 1200)
    assert (first["bytes_down"], first["bytes_down_dense"]) == (330, 1200)
    assert newest["bytes_down"] is newest["bytes_down_dense"] is None
    spread = first["accuracy"]
    assert (spread["count"], spread["low"], spread["median"], spread["high"]) == (3, 0.5, 0.6, 0.9)
    assert first["kept"]["mean"] == 0.5
    # Pairs: {0..3} and {2..5} share 2 of 6; {0..3} twice is 1.
    assert first["overlap"] == pytest.approx((1 / 3 + 1 / 3 + 1) / 3, abs=1e-4)
    assert newest["accuracy"] is None
    assert (first["means"], newest["means"]) == ({"val_accuracy": 0.625}, {})
    assert [r["attempt"] for r in got(client, "/api/v1/fleets/watch/attempts?before=3&limit=1")] == [2]


def test_a_device_whose_score_lies_below_zero_is_among_the_last_and_not_left_out(store, client):
    """As R² may, where a regression goes astray. Above 1 no score lies."""
    for device, score in zip(KEPT, (-14.5, 0.9, 1.5), strict=True):
        store.updates.keep("watch", 3, device, digest=B, size=100, base_version=1, found=found(device, score))
    spread = got(client, "/api/v1/fleets/watch/attempts?limit=1")[0]["accuracy"]
    assert (spread["count"], spread["low"], spread["high"]) == (2, 0.0, 0.9)


def test_a_round_lists_its_updates_and_masks_pair_by_pair(client):
    detail = got(client, "/api/v1/fleets/watch/attempts/1")
    updates = {u["device"]: u for u in detail["updates"]}
    assert updates["dora"]["status"] == "rejected"
    assert updates["dora"]["reason"] == "not finite"
    assert updates["bela"]["accuracy"] == 0.9
    assert updates["bela"]["metrics"] == {"val_accuracy": 0.9}
    assert [u["device"] for u in got(client, "/api/v1/fleets/watch/attempts/1?after=anna&limit=2")["updates"]] == [
        "bela", "carl",
    ]  # fmt: skip
    overlap = got(client, "/api/v1/fleets/watch/attempts/1/overlap")
    assert overlap["devices"] == ["anna", "bela", "carl"]
    assert overlap["matrix"][0] == [1.0, pytest.approx(1 / 3, abs=1e-4), 1.0]
    assert got(client, "/api/v1/fleets/watch/attempts/3/overlap")["matrix"] == []


def test_masked_devices_are_found_behind_those_that_keep_the_whole_model(store, views):
    """A page that shows the first sixteen said that all devices keep the whole model where those did."""
    number, plain = 3, update_summary.findings_of(Update({"w": np.zeros(4)}, 5.0, "a"), 400)
    for device in ("a0", "a1"):
        store.updates.keep("watch", number, device, digest=B, size=100, base_version=1, found=plain)
    for device in KEPT:
        store.updates.keep("watch", number, device, digest=B, size=100, base_version=1, found=found(device, 0.5))
    assert views.overlap("watch", number, limit=2).devices == list(KEPT)[:2]


def test_devices_quarantine_and_events(client):
    assert [d["device"] for d in got(client, "/api/v1/fleets/watch/devices?after=anna&limit=2")] == ["bela", "carl"]
    (out,) = got(client, "/api/v1/fleets/watch/quarantine")
    assert (out["device"], out["quarantine"]) == ("dora", "<b>two different updates</b>")
    assert got(client, "/api/v1/fleets/watch/devices/anna")["boot"] == 1
    (mine,) = got(client, "/api/v1/fleets/watch/devices/anna/updates")
    assert (mine["attempt"], mine["status"], mine["dense"]) == (1, "counted", 400)
    events = got(client, "/api/v1/fleets/watch/events?limit=3")
    assert [event["kind"] for event in events] == ["round-opened", "round-failed", "round-opened"]
    older = got(client, f"/api/v1/fleets/watch/events?limit=500&before={events[-1]['seq']}")
    assert older[0]["seq"] == events[-1]["seq"] - 1


def test_a_reason_that_is_no_text_and_a_path_that_is_none_are_answered(store, client, views):
    """As a terminal of another encoding gives them. The log and the fleets were answered by 500."""
    store.devices.quarantine("watch", "anna", "caf\udce9")
    views.tell("watch", {"event": "error", "error": "blobs: /srv/caf\udce9 is full"})
    assert got(client, "/api/v1/fleets/watch/events?limit=1")[0]["detail"] == {"reason": r"caf\udce9"}
    assert got(client, "/api/v1/fleets/watch")["trouble"] == [r"blobs: /srv/caf\udce9 is full"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/fleets/other", 404),
        ("/api/v1/fleets/other/events", 404),
        ("/api/v1/fleets/watch/attempts/99", 404),
        ("/api/v1/fleets/watch/devices/nobody", 404),
        ("/api/v1/fleets/watch/attempts?limit=501", 422),
        ("/api/v1/fleets/watch/attempts?limit=0", 422),
        ("/api/v1/fleets/watch/attempts?limit=1e9", 422),
        ("/api/v1/fleets/watch/attempts?before=-1", 422),
        ("/api/v1/fleets/watch/attempts/99999999999999999999", 422),
        ("/api/v1/fleets/watch/attempts/1/overlap?limit=49", 422),
        ("/api/v1/fleets/watch/devices?after=' OR 1=1 --", 422),
        ("/api/v1/fleets/WATCH%00", 422),
        ("/api/v1/fleets/" + "w" * 5000, 422),
        ("/api/v1/fleets/watch/devices/%2e%2e%2f%2e%2e", 404),
        ("/dashboard/../api.py", 404),
        ("/dashboard/%2e%2e/store.py", 404),
        ("/docs", 404),
    ],
)
def test_what_is_not_there_or_out_of_bounds_is_said_so(client, path, status):
    assert "detail" in got(client, path, status)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60), st.text(max_size=40), st.sampled_from(["before", "after", "limit", "x"]))
def test_any_name_and_query_is_answered_without_an_error_of_the_server(client, name, value, field):
    answer = client.get(f"/api/v1/fleets/{quote(name, safe='')}/devices", params={field: value})
    assert answer.status_code in (200, 404, 422)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_the_description_holds_for_whatever_may_be_asked(views, store, token):
    """Every operation as it is described; with a token in force, what comes without it learns nothing."""
    import schemathesis

    orders = []

    def answer(order):
        orders.append(order)
        order.answer.set_result("running")

    shown = {} if token is None else {"Authorization": f"Bearer {token}"}
    with answering(make_api(views, token=token, give={"watch": answer})) as client:
        url = str(client.base_url)
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=shown)
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) >= 17
        for operation in operations:

            @given(case=operation.as_strategy())
            @settings(max_examples=5, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            def holds(case):
                case.call_and_validate(base_url=url, headers=shown)

            @given(case=operation.as_strategy())
            @settings(max_examples=2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            def closed(case):
                case.headers.pop("Authorization", None)
                assert case.call(base_url=url).status_code == 401

            holds()
            if token is not None and operation.path not in OPEN_PATHS:
                given_before = len(orders)
                closed()
                assert len(orders) == given_before


# -- who may ask


def test_with_a_token_only_the_page_itself_is_open(views):
    with answering(make_api(views, token=TOKEN, local=False)) as client:
        for path in ("/", "/dashboard/app.js", "/dashboard/style.css", "/healthz"):
            assert client.get(path).status_code == 200
        for path in ("/api/v1/fleets", "/metrics", "/openapi.json", "/nothing"):
            for header in (None, "Bearer wrong", f"Basic {TOKEN}", f"bearer{TOKEN}", "Bearer", f"Bearer {TOKEN}x"):
                answer = client.get(path, headers={} if header is None else {"Authorization": header})
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/api/v1/fleets", headers=right).status_code == 200
        assert client.post("/api/v1/fleets/watch/abort").status_code == 401
        assert client.get(f"/api/v1/fleets?token={TOKEN}").status_code == 401


def test_a_foreign_page_or_name_cannot_use_this_machines_browser(views):
    with answering(make_api(views)) as client:
        assert client.post("/api/v1/fleets/watch/abort", headers={"Origin": "https://evil.example"}).status_code == 403
        assert client.get("/api/v1/fleets", headers={"Origin": "null"}).status_code == 403
        assert client.get("/api/v1/fleets", headers={"Host": "evil.example:8420"}).status_code == 403
        for host in ("", "[", ":8420", "127.0.0.1.evil.example", "localhost.evil.example:8420"):
            assert client.get("/api/v1/fleets", headers={"Host": host}).status_code in (400, 403)
        for host in ("localhost:8420", "127.0.0.1:8420", "127.0.0.2:8420", "[::1]:8420", "[::1]", "localhost"):
            assert client.get("/api/v1/fleets", headers={"Host": host}).status_code == 200
        same = {"Host": "127.0.0.1:8420", "Origin": "http://127.0.0.1:8420"}
        assert client.get("/api/v1/fleets", headers=same).status_code == 200


def test_behind_a_proxy_orders_need_the_host_that_it_was_asked_for(views):
    page = {"Authorization": f"Bearer {TOKEN}", "Origin": "https://fleet.example"}
    with answering(make_api(views, token=TOKEN)) as client:
        order = "/api/v1/fleets/nowhere/pause"
        assert client.post(order, headers={**page, "Host": "fleet.example"}).status_code == 404
        refused = client.post(order, headers={**page, "Host": "127.0.0.1:8420"})
    assert refused.status_code == 403
    assert "let a proxy before it pass on the Host" in refused.json()["detail"]


def test_bodies_are_refused_unread_and_answers_carry_their_headers(client):
    assert client.post("/api/v1/fleets/watch/pause", content=b"x" * 5000).status_code == 413
    assert client.post("/api/v1/fleets/watch/pause", content=iter([b"x"])).status_code == 413
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_asks_nobody_else(client):
    for path in ("/", "/dashboard/app.js", "/dashboard/style.css"):
        text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
        assert "innerHTML" not in text


def test_settings_of_the_api(tmp_path):
    word = tmp_path / "api.token"
    word.write_text(TOKEN + "\n")
    word.chmod(0o600)
    assert ApiConfig().token() is None
    assert ApiConfig(token_file=word).token() == TOKEN
    assert TOKEN not in repr(ApiConfig(token_file=word))
    with pytest.raises(ConfigError, match="/dev/zero is no token"):
        ApiConfig(token_file=Path("/dev/zero")).token()  # of no size, and without an end
    outside = ApiConfig(host="0.0.0.0", token_file=word)
    with pytest.raises(ConfigError, match=r"beyond this machine; give .* token_file"):
        ApiConfig(host="192.0.2.1").token(insecure=True)
    with pytest.raises(ConfigError, match="without TLS"):
        outside.token()
    assert outside.token(insecure=True) == TOKEN
    with pytest.raises(ConfigError, match="belong together"):
        ApiConfig(cert=word).token()
    word.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        ApiConfig(token_file=word).token()
    word.chmod(0o600)
    for bad in ("short", "two words of some length", "", "x" * 5000):
        word.write_text(bad)
        with pytest.raises(ConfigError, match="token_file"):
            ApiConfig(token_file=word).token()
    with pytest.raises(ConfigError, match="did you mean 'port'"):
        api_of(Section({"prot": 1}, "fleet.toml", "api"))
    assert stat.S_IMODE(word.stat().st_mode) == 0o600


# -- orders


def state_with(phase):
    state = CoordinatorState(current=4)
    state.attempts[4] = Attempt(4, 1, b"", None, 1, 1, 0, {}, phase=phase)
    state.peers = {"anna": Peer(), "dora": Peer(out="two different updates")}
    return state


@pytest.mark.parametrize(
    ("status", "verb", "phase", "after", "event"),
    [
        ("running", "pause", "open", "paused", None),
        ("paused", "pause", "open", None, None),
        ("paused", "resume", "open", "running", None),
        ("aborted", "resume", "failed", "running", None),
        ("running", "abort", "open", "aborted", e.AbortRound),
        ("running", "abort", "closed", "aborted", e.AbortRound),
        ("running", "abort", "committed", "aborted", None),
        ("running", "quarantine", "open", None, e.Revoke),
    ],
)
def test_orders_and_what_they_mean(store, status, verb, phase, after, event):
    from dataclasses import replace

    fleet = replace(store.fleets.get("watch"), status=status)
    order = Order(verb, device="anna" if verb == "quarantine" else "")
    found_status, found_event = decide(order, fleet, state_with(phase))
    assert found_status == after
    assert found_event is None if event is None else isinstance(found_event, event)


def test_orders_that_do_not_fit_are_refused(store):
    from dataclasses import replace

    fleet, state = store.fleets.get("watch"), state_with("open")
    for verb in ("pause", "resume", "abort"):
        with pytest.raises(ConfigError, match="is done"):
            decide(Order(verb), replace(fleet, status="done"), state)
    with pytest.raises(ConfigError, match="is aborted"):
        decide(Order("pause"), replace(fleet, status="aborted"), state)
    with pytest.raises(ConfigError, match="not known"):
        decide(Order("release", device="nobody"), fleet, state)
    with pytest.raises(ConfigError, match="not in quarantine"):
        decide(Order("release", device="anna"), fleet, state)
    assert isinstance(decide(Order("release", device="dora"), fleet, state)[1], e.Release)


def test_orders_reach_the_fleet_that_is_served_and_no_other(views, monkeypatch):
    given_ = []

    def give(order):
        given_.append(order)
        if order.verb == "abort":
            order.answer.set_exception(ConfigError("fleet 'watch' is done; it cannot abort"))
        elif order.verb != "resume":
            order.answer.set_result("paused")

    with answering(make_api(views, give={"watch": give})) as client:
        answer = client.post("/api/v1/fleets/watch/pause", params={"reason": "night"})
        assert answer.json() == {"fleet": "watch", "status": "paused"}
        assert (given_[0].verb, given_[0].reason) == ("pause", "night")
        assert client.post("/api/v1/fleets/watch/devices/anna/quarantine").status_code == 200
        assert (given_[1].verb, given_[1].device) == ("quarantine", "anna")
        refused = client.post("/api/v1/fleets/watch/abort")
        assert (refused.status_code, refused.json()["detail"]) == (409, "fleet 'watch' is done; it cannot abort")
        assert client.post("/api/v1/fleets/watch/pause", params={"reason": "x" * 201}).status_code == 422
        assert client.post("/api/v1/fleets/other/pause").status_code == 404
        assert client.get("/api/v1/fleets/watch/pause").status_code == 405
        monkeypatch.setattr("talaria_coordinator.web.api.ANSWER_S", 0.05)
        assert client.post("/api/v1/fleets/watch/resume").status_code == 503
    with answering(make_api(views)) as alone:
        assert alone.post("/api/v1/fleets/watch/pause").status_code == 409


# -- beside the learning


def test_reading_neither_waits_for_a_writer_nor_stops_one(store, views):
    with store.database.engine.begin() as writing:
        writing.exec_driver_sql("UPDATE fleets SET round = 2")
        assert views.fleet("watch").round == 1
    with views._reading() as reading:
        reading.exec_driver_sql("SELECT * FROM fleets").fetchall()
        store.fleets.set_status("watch", "paused")
    assert views.fleet("watch").status == "paused"


def test_a_view_cannot_write(views):
    from sqlalchemy.exc import OperationalError

    with views._engine.connect() as connection, pytest.raises(OperationalError, match="readonly"):
        connection.exec_driver_sql("UPDATE fleets SET round = 9")


def test_a_store_that_does_not_answer_is_said_so(tmp_path):
    views = Views(tmp_path / "not" / "there.db")
    with answering(make_api(views)) as client:
        answer = client.get("/api/v1/fleets")
        assert (answer.status_code, "does not answer" in answer.json()["detail"]) == (503, True)
        assert b"talaria_store_up{" in Metrics("watch", views, tmp_path).text()


# -- figures


def figures(metrics):
    text = metrics.text().decode()
    return {
        (sample.name, tuple(v for k, v in sorted(sample.labels.items()) if k != "fleet")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_head_is_get_without_a_body(client):
    """A watchdog that asks so was told 405, and took the coordinator for dead."""
    for path in ("/", "/healthz", "/metrics", "/api/v1/fleets"):
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert client.head("/api/v1/fleets/watch/pause").status_code == 405


def test_when_a_round_was_last_committed_is_told_however_many_fail_since(store, views, tmp_path):
    """An alert that looks for the time since then was silent once twenty attempts had failed."""
    committed = ("talaria_last_commit_timestamp_seconds", ())
    before, number = figures(Metrics("watch", views, tmp_path))[committed], 3
    for _ in range(20):
        store.attempts.fail("watch", number, "0 of at least 2 updates came")
        number = store.attempts.open("watch", 2, list(KEPT), C).attempt
    found = figures(Metrics("watch", views, tmp_path))
    assert (found[committed], found["talaria_round_state", ("open",)]) == (before, 1)


def test_what_alerts_see_increase_is_there_before_it_happens(views, tmp_path):
    """Prometheus sees no increase in a counter that comes with its first event: the first update that was refused, the
    first devices that were shut out and the first round that failed raised no alert."""
    found = figures(Metrics("watch", views, tmp_path))
    for key in (
        ("talaria_attempts_total", ("failed",)),
        ("talaria_updates_total", ("equivocation", "")),
        ("talaria_errors_total", ()),
        *((f"talaria_{what}_total", (why,)) for what in ("quarantines", "messages_refused") for why in REASONS),
        *(("talaria_updates_total", ("rejected", why)) for why in REASONS),
    ):
        assert found.get(key) == 0, key


def test_metrics_follow_the_journal_the_machine_and_the_store(views, tmp_path):
    metrics = Metrics("watch", views, tmp_path)
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / "x.part").write_bytes(b"x" * 5000)
    for event in ("connected", "disconnected", "connected", "error"):
        metrics.tell({"event": event, "at": 1.0})
    for event, worker in (("connected", 0), ("connected", 1), ("lost", 0), ("connected", 2), ("disconnected", 2)):
        metrics.tell({"event": f"ingest-{event}", "worker": worker, "at": 1.0})
    for over in ("pause", "abort", "budget-spent", "round-opened"):  # of which the first three raised an alert for good
        metrics.tell({"event": "waiting", "here": 1, "needed": 3, "at": 9.0})
        assert figures(metrics)["talaria_devices_missing", ()] == 2
        metrics.tell({"event": over, "attempt": 4, "at": 10.0})
        assert figures(metrics)["talaria_devices_missing", ()] == 0
    metrics.tell({"event": "round-opened", "attempt": 4, "at": 10.0})
    metrics.observe(a.RoundClosed(4, (a.Counted("anna", 4, 1, b""),), ("bela",)))
    metrics.tell({"event": "round-closed", "attempt": 4, "at": 13.0})
    metrics.tell({"event": "round-failed", "attempt": 5, "at": 14.0})
    up, cut = "fl/1/watch/d/anna/up/0123456789abcdef", None
    metrics.observe(e.Received(0.0, up, b""))
    metrics.observe(a.KeepChunk("anna", "0123456789abcdef", cut, 0, b""))
    metrics.observe(e.Received(0.0, up, b""))
    metrics.observe(e.Received(0.0, "fl/1/watch/d/anna/evt", b"seven"))
    metrics.observe(e.ChunksCame(0.0, "anna", "0123456789abcdef", frozenset({1, 2}), 1000))
    metrics.observe(a.SendChunks("watch", "", "x", 1, 0, cut, (0, 1, 2), "m"))
    metrics.observe(a.SendChunks("watch", "anna", "x", 1, 0, cut, (1,), "dn"))
    for device in ("anna", "bela", "bela"):  # a part of the model, or a kit, comes to each alone from the beginning
        metrics.observe(a.SendChunks("watch", device, "y", 1, 0, cut, (0, 1), "dn"))
    metrics.observe(e.UpdateRejected(0.0, 4, "carl", "tensor 'w' holds values that are not finite"))
    metrics.observe(a.FrameRefused("fl/1/watch/d/eve/evt", "eve", "message of 'eve' is not signed by its key; refused"))
    metrics.sent(100)
    found = figures(metrics)
    expected = {
        ("talaria_round_state", ("open",)): 1,
        ("talaria_round_state", ("paused",)): 0,
        ("talaria_devices_online", ()): 3,
        ("talaria_devices_quarantined", ()): 1,
        ("talaria_broker_reconnects_total", ()): 1,
        ("talaria_broker_up", ()): 1,
        ("talaria_ingest_workers", ()): 1,
        ("talaria_devices_missing", ()): 0,
        ("talaria_errors_total", ()): 1,
        ("talaria_attempts_total", ("closed",)): 1,
        ("talaria_attempts_total", ("failed",)): 1,
        ("talaria_round_seconds_sum", ()): 3,
        ("talaria_updates_total", ("counted", "")): 1,
        ("talaria_updates_total", ("missing", "")): 1,
        ("talaria_updates_total", ("rejected", "finite")): 1,
        ("talaria_messages_refused_total", ("signature",)): 1,
        ("talaria_chunks_total", ("received",)): 1 + 2,
        ("talaria_chunks_total", ("sent-to-all",)): 3,
        ("talaria_retransmitted_chunks_total", ("received",)): 1,
        ("talaria_retransmitted_chunks_total", ("sent",)): 1 + 2,
        ("talaria_transfer_bytes_total", ("sent",)): 100,
        ("talaria_transfer_bytes_total", ("received",)): 2 * len(up)
        + len("fl/1/watch/d/anna/evt")
        + len("seven")
        + 1000,
        ("talaria_round_upload_bytes", ()): 300,
        ("talaria_round_dense_bytes", ()): 1200,
        ("talaria_val_accuracy", ("median",)): 0.6,
        ("talaria_mean", ("val_accuracy",)): 0.625,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert 5000 <= found["talaria_reassembly_bytes", ()] < 20000
    assert found["process_resident_memory_bytes", ()] > 2**20


def test_a_fleet_that_waits_for_its_store_or_its_broker_reaches_none(views, tmp_path):
    """As after `extend` while the broker is away: no alert told of it, all night."""
    metrics = Metrics("watch", views, tmp_path)
    metrics.tell({"event": "connected", "at": 1.0})
    metrics.tell({"event": "ingest-connected", "worker": 0, "at": 1.0})
    metrics.tell({"event": "failed", "error": "cannot use the MQTT broker", "again_in_s": 2.0, "at": 2.0})
    found = figures(metrics)
    assert (found["talaria_broker_up", ()], found["talaria_ingest_workers", ()]) == (0, 0)


def test_the_docs_explain_the_figures_and_no_others(views, tmp_path):
    table = (Path(__file__).parents[2] / "docs" / "operating.md").read_text().split("| Figure |")[1].split("\n\n")[0]
    explained = set(re.findall(r"`([a-z_]+)(?:\{[a-z,]*\})?`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    found_fleet(tmp_path / "keys", "watch", ["localhost"], 8883, 2)
    families = text_string_to_metric_families(Metrics("watch", views, tmp_path, tmp_path / "keys").text().decode())
    given_ = {f"{f.name}{'_total' if f.type == 'counter' else ''}".removeprefix("talaria_") for f in families}
    ours = {name for name in given_ if not name.startswith(("process_", "python_")) and not name.endswith("_created")}
    assert ours == explained - {"process_resident_memory_bytes"}


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=80))
def test_a_strangers_text_never_becomes_a_label(reason):
    assert class_of(reason) in REASONS


# -- a real server


def test_a_real_server_answers_many_at_once_and_ends(views):
    config = ApiConfig(port=0)
    with listening(config) as sock, serving(make_api(views, metrics=lambda: b"x 1\n"), config, sock):
        url = url_of(config, sock)
        answers = []

        def get():
            answers.append(httpx.get(f"{url}/api/v1/fleets/watch/attempts", timeout=20).status_code)

        threads = [threading.Thread(target=get) for _ in range(12)]
        [t.start() for t in threads], [t.join() for t in threads]
        assert answers == [200] * 12
        assert httpx.get(f"{url}/metrics").text == "x 1\n"
        assert httpx.get(f"{url}/healthz").headers.get("server") is None
        with socket.create_connection(sock.getsockname(), timeout=20) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 300_000)
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/healthz")


def test_a_port_that_is_taken_is_said_so():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*give \[api\] another port"):
            listening(ApiConfig(port=port)).__enter__()


def test_a_certificate_that_does_not_serve_is_said_so(views, tmp_path):
    config = ApiConfig(port=0, cert=tmp_path / "no.pem", key=tmp_path / "no.key")
    with listening(config) as sock, pytest.raises(ConfigError, match="do not serve"):
        serving(make_api(views), config, sock).__enter__()


def test_a_key_that_others_can_read_or_that_asks_for_a_passphrase_is_refused(views, tmp_path):
    """OpenSSL asked the terminal for the passphrase, and the coordinator waited."""
    found_fleet(tmp_path / "keys", "watch", ["localhost"], 8883, 2)
    cert, key, locked = (tmp_path / "keys" / name for name in ("coordinator.crt", "coordinator.key", "locked.key"))
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(plain.private_bytes(*form, serialization.BestAvailableEncryption(b"word")))
    config = ApiConfig(port=0, cert=cert, key=locked)
    with listening(config) as sock, pytest.raises(ConfigError, match="the key without a passphrase"):
        serving(make_api(views), config, sock).__enter__()
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"api: key .*coordinator.key can be read by everybody here; run `chmod 600"):
        ApiConfig(cert=cert, key=key).token()
    key.chmod(0o640)
    assert ApiConfig(cert=cert, key=key).token() is None


def test_an_orders_future_is_kept_out_of_its_text():
    assert isinstance(Order("pause").answer, Future)
    assert "answer" not in repr(Order("pause"))
