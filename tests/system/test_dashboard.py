"""The dashboard in a real browser, over a real short fleet: what it shows, with a token and without, and that nothing
a device says becomes part of the page."""

import html
import io
import json
import os
import re
import shutil
import subprocess
from contextlib import redirect_stdout

import httpx
import pytest
from javascript import Chromium, shown, when

from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria_coordinator.cli.status import read_status, render
from talaria_coordinator.config.api import ApiConfig
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.records import Spent, Worker
from talaria_coordinator.storage.store import Store
from talaria_coordinator.web.api import make_api
from talaria_coordinator.web.metrics import Metrics
from talaria_coordinator.web.queries import Views
from talaria_coordinator.web.server import listening, serving, url_of

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture
def page(tmp_path):
    """The page's elements after its scripts have run for a while."""

    def dump(url):
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
                "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={tmp_path / 'browser'}",
                "--virtual-time-budget=8000", "--dump-dom", url,
            ],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return dump


def text_of(dom, ident):
    """The text within the element with this id, roughly: up to the next element with an id."""
    found = re.search(rf'id="{ident}"[^>]*>(.*?)(?=<[a-z]+[^>]* id="|</main>)', dom, re.S)
    assert found, f"no #{ident} in {dom[:3000]}"
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", found[1]))).strip()


def test_a_short_fleet_on_the_dashboard(fleet, a_run, page):
    one = fleet(a_run("hermes", rounds=4))
    one.extra = "[api]\nport = 0\n"
    config = one.config
    config.write_text(config.read_text().replace("stay = false", "stay = true"))
    coordinator = one._start("coordinator", "serve", config, "--json")
    ready = coordinator.wait_for("ready")
    one.agents(ready["broker"])
    coordinator.wait_for("done")
    dom = page(ready["api"])
    rounds = httpx.get(f"{ready['api']}/api/v1/fleets/watch/attempts").json()
    assert "<title>watch 4/4 · Talaria</title>" in dom
    assert text_of(dom, "tile-rounds").startswith("4 / 4")
    assert text_of(dom, "tile-devices").endswith("/ 4 devices online")
    assert text_of(dom, "tile-quarantined").startswith("0")
    share = rounds[0]["bytes_up"] / rounds[0]["bytes_dense"]
    assert share < 0.9
    assert text_of(dom, "tile-dense").startswith(f"{100 * share:.1f} %")
    down = rounds[0]["bytes_down"] / rounds[0]["bytes_down_dense"]
    assert 0 < down < 0.9
    assert text_of(dom, "tile-down").startswith(f"{100 * down:.1f} %")
    low, median, high = (f"{100 * rounds[0]['accuracy'][key]:.1f} %" for key in ("low", "median", "high"))
    assert text_of(dom, "tile-accuracy") == f"{median} median accuracy, last round"
    assert f"round 4: {low} to {high}, median {median}, 4 devices" in html.unescape(dom).replace("\xa0", " ")
    assert text_of(dom, "tile-overlap").startswith(f"{100 * rounds[0]['overlap']:.1f} %")
    assert dom.count('class="bar"') == 4
    assert dom.count('class="dot"') == 4
    assert 'class="band"' in dom
    assert dom.count('class="cell"') == 16
    assert "anna and bela:" in dom
    assert "Nobody is shut out." in text_of(dom, "quarantine")
    for device in one.devices:
        assert device in text_of(dom, "devices")
    assert "round-closed" in text_of(dom, "events")
    assert re.search(r'<button id="pause"[^>]*disabled', dom)
    assert re.search(r'<p id="trouble"[^>]*hidden', dom)


@pytest.fixture
def chromium(tmp_path):
    browser = Chromium(tmp_path / "driven")
    yield browser
    browser.close()


THERE = when("!document.getElementById('main').hidden")


def test_a_great_fleet_is_shown_in_part_which_is_said_and_the_keyboard_stays(tmp_path, chromium):
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", '{"rounds": 3, "algorithm": "fedavg", "spec": {"name": "mlp"}}', "a" * 64, "b" * 64)
        for number in range(203):
            store.devices.see("watch", Sight(f"d{number:03}", 1, {}, online=number % 100 > 0))
        store.devices.quarantine("watch", "d001", "it lied")
        number = store.attempts.open("watch", 1, ["d001"], "a" * 64).attempt
        found = json.dumps({"metrics": {"drift.labels": 0.25, "drift.features": 1e9}, "weight": 1.0, "dense": 4})
        store.updates.keep("watch", number, "d001", digest="c" * 64, size=4, base_version=0, found=found)
        store.attempts.fail("watch", number, "it is over")
    views, config = Views(tmp_path / "coordinator.db"), ApiConfig(port=0)
    with listening(config) as sock, serving(make_api(views), config, sock):
        session, page = shown(chromium, url_of(config, sock))
        size = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
        chromium.ask("Emulation.setDeviceMetricsOverride", session, **size)
        page(THERE)
        text = page("document.body.innerText")
        assert "The first 200 of 203 by name." in text
        assert text.count("by name.") == 1, "of those in quarantine all are shown"
        assert "away: d000, d100 and others." in text
        assert "at most, of the first 200" in text
        assert page("document.documentElement.scrollWidth") == 360, "a telephone shows all of its width"
        page("for (const button of document.querySelectorAll('#devices button')) button.old = true")
        page("document.querySelectorAll('#devices button')[7].focus()")
        page(when("!document.querySelector('#devices button').old"))
        assert page("document.activeElement.closest('tr').innerText").startswith("d007")
    views.close()


REFUSING = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }"
NONE = "Object.defineProperty(window, 'sessionStorage', {get() { throw new DOMException('no', 'SecurityError') }})"


@pytest.mark.parametrize("storage", ["", NONE, REFUSING])
def test_the_token_opens_the_door_in_a_browser_that_stores_nothing(odd, chromium, storage):
    config = ApiConfig(port=0)
    with listening(config) as sock, serving(make_api(odd, token="x" * 32), config, sock):
        _, page = shown(chromium, url_of(config, sock), storage)

        def enter(word):
            page(when("!document.getElementById('door').hidden"))
            page(f"document.getElementById('token').value = {json.dumps(word)}")
            page("document.querySelector('#door button').click()")

        enter("ключ")
        said = page(when("document.getElementById('trouble').textContent"))
        assert said == "That token is not the right one."
        enter("x" * 32)
        page(THERE)
    assert page("document.getElementById('door').hidden")


HELD = """
const real = window.fetch;
Object.assign(window, { asked: [], held: "nothing", confirm: () => true });
window.fetch = (path, options) => {
  window.asked.push(`${options.method || "GET"} ${path}`);
  const late = path.includes(window.held) ? 1500 : 0;
  return real(path, options).then((answer) => new Promise((done) => setTimeout(() => done(answer), late)));
};
"""


def test_what_comes_late_of_one_fleet_is_not_shown_as_anothers_and_orders_go_to_the_one_that_is_shown(
    tmp_path, chromium
):
    with Store(tmp_path / "coordinator.db") as store:
        for fleet, device in (("alpha", "anna"), ("beta", "bela")):
            store.fleets.enter(fleet, '{"rounds": 3, "algorithm": "fedavg"}', "a" * 64, "b" * 64)
            store.devices.see(fleet, Sight(device, 1, {}))
        known = store.fleets.get("beta")
        made, late = (store.attempts.open("beta", 1, ["bela"], "a" * 64).attempt for _ in range(2))
        found = json.dumps({"metrics": {}, "weight": 1.0, "dense": 4})
        store.updates.keep("beta", made, "bela", digest="c" * 64, size=4, base_version=0, found=found)
        facts = {"epoch": known.epoch, "model_digest": "c" * 64, "server": "b" * 64}
        store.attempts.commit("beta", late, counted=[(made, "bela")], **facts)  # as an asynchronous run does

    def give(order):
        order.answer.set_exception(ConfigError("it does not fit"))

    views, config = Views(tmp_path / "coordinator.db"), ApiConfig(port=0)
    with listening(config) as sock, serving(make_api(views, give={"alpha": give}), config, sock):
        _, page = shown(chromium, url_of(config, sock), HELD)

        def choose(fleet, held):
            page(f"window.held = '/fleets/{held}/'; window.asked = []")
            if held == "alpha":  # so that it asks of this one when the other is chosen
                page(when("window.asked.some((one) => one.includes(window.held))"))
            page(f"document.getElementById('fleet').value = '{fleet}'")
            page("document.getElementById('fleet').dispatchEvent(new Event('change'))")

        page(THERE)
        choose("beta", held="alpha")
        page(when("document.title.startsWith('beta')"))
        seen = page("new Promise((done) => setTimeout(() => done([document.title, document.body.innerText]), 1700))")
        assert seen[0].startswith("beta")
        assert "bela" in seen[1]
        assert "anna" not in seen[1]
        assert "devices behind them" not in seen[1], "there is no gateway"
        choose("alpha", held="nobody")
        page(when("document.title.startsWith('alpha')"))
        choose("beta", held="beta")
        page("document.querySelector('#devices button').click()")
        assert page(when("window.asked.find((one) => one.startsWith('POST'))")).endswith("alpha/devices/anna/retire")
        why = "document.getElementById('trouble').textContent"
        assert page(when(why)) == "it does not fit"
        page(when("document.title.startsWith('beta')"))
        page("window.asked = []")
        page(when("window.asked.filter((one) => one.includes('/events')).length > 1"))
        assert page(why) == "it does not fit", "it stays after the page has asked again"
    views.close()


@pytest.fixture
def odd(tmp_path):
    """A store whose devices say odd things."""
    store = Store(tmp_path / "coordinator.db")
    store.fleets.enter("watch", '{"rounds": 3, "algorithm": "fedavg", "spec": {"name": "mlp"}}', "a" * 64, "b" * 64)
    store.devices.see("watch", Sight("eve", 1, {}))
    store.devices.quarantine("watch", "eve", EVIL)
    store.attempts.fail("watch", store.attempts.open("watch", 1, ["eve"], "a" * 64).attempt, EVIL)
    views = Views(tmp_path / "coordinator.db")
    yield views
    views.close()
    store.close()


def test_the_mean_within_a_sum_stands_where_no_device_tells_its_own(tmp_path, page):
    with Store(tmp_path / "coordinator.db") as store:
        run = '{"rounds": 3, "algorithm": "hermes", "spec": {"name": "mlp"}}'
        fleet = store.fleets.enter("watch", run, "a" * 64, "b" * 64)
        for value in (-14.5, 0.625):
            number = store.attempts.open("watch", fleet.round + 1, ["anna"], "a" * 64).attempt
            facts = {"epoch": fleet.epoch, "counted": [], "model_digest": "c" * 64, "server": "b" * 64}
            store.attempts.commit("watch", number, means={"val_accuracy": value}, **facts)
            fleet = store.fleets.get("watch")
        store.devices.see("watch", Sight("anna", 1, {}))
        store.devices.see("watch", Sight("bela", 1, {}, online=False))
    views, config = Views(tmp_path / "coordinator.db"), ApiConfig(port=0)
    views.tell("watch", {"event": "error", "error": "blobs: No space left on device; free space there"})
    with listening(config) as sock, serving(make_api(views), config, sock):
        dom = page(url_of(config, sock))
    views.close()
    assert text_of(dom, "tile-accuracy").startswith("62.5 % mean accuracy")
    for mean in ("0.0", "62.5"):  # of a regression, where R² may lie below 0
        assert f": mean {mean} %, " in html.unescape(dom).replace("\xa0", " ")
    assert dom.count('class="dot"') == 2
    assert "val_accuracy 0.6250" in text_of(dom, "rounds")
    full = "Trouble: blobs: No space left on device; free space there."
    assert text_of(dom, "waits").startswith(f"{full} No round is open; away: bela. ")
    tiles = len(re.findall(r'id="tile-', dom))
    across = {width: int(count) for width, count in re.findall(r"--(wide|middle|small): (\d+)", dom)}
    assert set(across) == {"wide", "middle", "small"}
    for most, count in zip((8, 4), (across["wide"], across["middle"]), strict=True):
        assert count <= most
        assert tiles % count != 1, "a tile stands alone on its row"


def test_what_privacy_has_cost_is_told_everywhere_and_by_whose_noise(tmp_path, page):
    """By the API, the metrics, ``talaria coordinator status`` and the page."""
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=3)
    config = FleetConfig(name="watch", run=run, state=tmp_path, members=("anna", "bela"))
    cost = {"noise": 2.0, "secure": True, "rounds": {"anna": 2, "bela": 1}, "version": 2, "noise_by": "devices"}
    with Store(tmp_path / "coordinator.db") as store:
        fleet = store.fleets.enter("watch", run.to_json(), "a" * 64, "b" * 64)
        number = store.attempts.open("watch", 1, ["anna"], "a" * 64).attempt
        facts = {"epoch": fleet.epoch, "counted": [], "model_digest": "c" * 64, "server": "b" * 64}
        spent = Spent(epsilon=7.5, delta=1e-5, budget=8.0, **cost)
        store.attempts.commit("watch", number, spent=spent, **facts)
    views, api = Views(tmp_path / "coordinator.db"), ApiConfig(port=0)
    with listening(api) as sock, serving(make_api(views), api, sock):
        told = httpx.get(f"{url_of(api, sock)}/api/v1/fleets/watch").json()["privacy"]
        dom = page(url_of(api, sock))
    figures = Metrics("watch", views, tmp_path).text().decode()
    views.close()
    form = "shared: each device adds a part of the noise"
    assert (told["epsilon"], told["budget"], told["delta"], told["rounds"]) == (7.5, 8.0, 1e-5, 2)
    assert told["form"].startswith(form)
    assert 'talaria_epsilon{fleet="watch"} 7.5' in figures
    assert 'talaria_epsilon_budget{fleet="watch"} 8.0' in figures
    assert re.match(rf"7\.50? epsilon of 8, delta 0\.00001; {form}", text_of(dom, "tile-epsilon"))
    with pytest.MonkeyPatch.context() as wide, io.StringIO() as out, redirect_stdout(out):
        wide.setenv("COLUMNS", "300")
        render(read_status(config))
        shown = out.getvalue()
    assert f"epsilon 7.5 of 8 at delta 1e-05, of the device counted most often (2 rounds); {form}" in shown


def test_ingest_workers_are_told_by_the_api_the_status_and_the_page(tmp_path, page):
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=3)
    config = FleetConfig(name="watch", run=run, state=tmp_path, members=("anna", "bela"), workers=2)
    here = Worker(number=0, pid=77, since=1e9, connected=True, devices=3, updates=41, heard=1e9 + 5, word="it [b]works")
    gone = Worker(number=1, pid=None, since=1e9, connected=False, devices=2, updates=7, heard=1e9, word=EVIL)
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", run.to_json(), "a" * 64, "b" * 64)
        store.fleets.note_workers("watch", [here, gone])
        views, api = Views(tmp_path / "coordinator.db"), ApiConfig(port=0)
        with listening(api) as sock, serving(make_api(views), api, sock):
            told = httpx.get(f"{url_of(api, sock)}/api/v1/fleets/watch").json()["workers"]
            dom = page(url_of(api, sock))
        with pytest.MonkeyPatch.context() as wide, io.StringIO() as out, redirect_stdout(out):
            wide.setenv("COLUMNS", "300")
            render(read_status(config))
            shown = out.getvalue()
        store.fleets.enter("watch", run.to_json(), "a" * 64, "b" * 64)  # nobody is here until heard
        assert views.fleet("watch").workers == []
        views.close()
    assert told == [vars(here), vars(gone)]
    rows = text_of(dom, "workers")
    assert re.search(r"0 77 connected \S+ days ago 3 41 \S+ days ago it \[b\]works 1 – gone \S+ days ago 2 7 ", rows)
    assert "<img" not in dom
    assert re.search(r"0 . 77 .* yes .* 3 . +41 .* it \[b\]works", shown)
    assert re.search(r"1 . gone .* 2 . +7 ", shown)


def test_what_a_device_says_stays_text(odd, page):
    config = ApiConfig(port=0)
    with listening(config) as sock, serving(make_api(odd), config, sock):
        dom = page(url_of(config, sock))
    assert "<title>watch 0/3 · Talaria</title>" in dom
    assert "<img" not in dom
    assert dom.count("<script") == 1
    assert EVIL in text_of(dom, "quarantine").replace("  ", " ") or html.escape(EVIL, quote=False) in dom
    assert "Release" in text_of(dom, "quarantine")
    assert "No update has come yet." in dom
    assert "not every algorithm does" in dom
    assert re.search(r'id="workers-card" hidden', dom)


@pytest.fixture
def moving(tmp_path):
    """A store in which anna's and bela's samples have moved, carl has told nothing, and dora was taken out. bela is a
    gateway with twelve devices behind it."""
    store = Store(tmp_path / "coordinator.db")
    store.fleets.enter("watch", '{"rounds": 9, "algorithm": "fedavg", "spec": {"name": "mlp"}}', "a" * 64, "b" * 64)
    for name in ("anna", "bela", "carl", "dora"):
        store.devices.see("watch", Sight(name, 1, {}))
    store.devices.retire("watch", "dora", True, by="owner")
    told = [
        {"anna": {"drift.labels": 0.9, "drift.features": 9.0}},
        {"anna": {"drift.labels": 0.25, "drift.features": 1.24}, "bela": {"drift.features": 0.5}, "carl": {"loss": 1}},
    ]
    for round, found in enumerate(told, 1):
        number = store.attempts.open("watch", round, list(found), "a" * 64).attempt
        for name, metrics in found.items():
            site = {"clients": 12} if name == "bela" else {}
            text = json.dumps({"metrics": metrics, "weight": 1.0, "dense": 4} | site)
            store.updates.keep("watch", number, name, digest="c" * 64, size=4, base_version=0, found=text)
    views = Views(tmp_path / "coordinator.db")
    yield views
    views.close()
    store.close()


def test_how_far_samples_have_moved_is_shown_for_each_device(moving, page):
    config = ApiConfig(port=0)
    with listening(config) as sock, serving(make_api(moving), config, sock):
        url = url_of(config, sock)
        found = {d["device"]: d["drift"] for d in httpx.get(f"{url}/api/v1/fleets/watch/devices").json()}
        alone = httpx.get(f"{url}/api/v1/fleets/watch/devices/anna").json()["drift"]
        dom = page(url)
    assert found["anna"] == alone == {"attempt": 2, "labels": 0.25, "features": 1.24}  # what it told last
    assert found["bela"] == {"attempt": 2, "labels": None, "features": 0.5}
    assert found["carl"] is found["dora"] is None
    assert text_of(dom, "tile-drift").startswith("25.0 % / 1.2 sd labels / features moved since the first day")
    rows = text_of(dom, "devices")
    assert re.search(r"labels moved features moved", rows)
    assert re.search(
        r"anna online 1 [^%]* 25\.0 % 1\.2 sd Retire bela online 1 [^–]* – 0\.50 sd Retire carl online", rows
    )
    assert "dora left by its owner" in rows
    assert re.search(r"counted devices behind them rejected .* 2 2 open 3 \(3\) 14 0 ", text_of(dom, "rounds"))


def test_nothing_is_told_of_drift_where_no_device_tells_it(odd, page):
    config = ApiConfig(port=0)
    with listening(config) as sock, serving(make_api(odd), config, sock):
        dom = page(url_of(config, sock))
    assert "tile-drift" not in dom
    assert "devices behind them" not in dom
    assert "labels moved" not in dom


def test_without_the_token_the_page_shows_a_door_and_no_facts(odd, page):
    config = ApiConfig(port=0)
    with listening(config) as sock, serving(make_api(odd, token="x" * 32), config, sock):
        dom = page(url_of(config, sock))
    assert re.search(r'<form id="door">', dom)
    assert re.search(r'<main id="main" hidden', dom)
    assert "eve" not in re.sub(r"<[^>]+>", " ", dom).split()


def test_the_page_refreshes_itself(odd, page):
    seen = []

    async def counted(scope, receive, send):
        seen.append(scope["path"])
        await app(scope, receive, send)

    app, config = make_api(odd), ApiConfig(port=0)
    with listening(config) as sock, serving(counted, config, sock):
        page(url_of(config, sock))
    assert seen.count("/") == 1
    assert seen.count("/api/v1/fleets") >= 2
