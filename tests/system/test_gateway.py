"""A site behind a gateway, all of it real processes: the fleet learns what it learns of the site's devices themselves,
to the roundings of the site's mean, and one update a round goes up."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from keyed import enrol, free_port
from tolerance import roundings

from talaria import tensors
from talaria.aggregate.partial_sum import partial_sum
from talaria.errors import ConfigError
from talaria.federated import rounds, run_model
from talaria.federated.run import Member
from talaria.planning.plan import Plan
from talaria_coordinator.cli.orders import given
from talaria_coordinator.cli.template import found
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.maintenance import fsck
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.data import NpzSource
from talaria_edge.storage.state import DeviceStore

DIRECT, SITE = ("anna", "bela"), ("carl", "dora", "ella")


class WithSite:
    """A fleet of two devices and a gateway of three, in one folder."""

    def __init__(self, fleet, run, widths=None, more="", keyed=False):
        self.run, self.widths = run, widths or {}
        self.fleet = fleet(run, devices=(*DIRECT, "site"), widths=self.widths)
        self.fleet.extra = "quorum = 1.0\n[gateways]\nsite = 3\n" + more
        self.port, self.keyed, self.stay = 0, keyed, "false"
        if keyed:
            self.fleet.folder.chmod(0o755)  # Mosquitto may be another user
            self.fleet.extra += self.identity("keys-watch")
            self.fleet.port, self.port = free_port(), free_port()
            for name, port, members in (("watch", self.fleet.port, (*DIRECT, "site")), ("garden", self.port, SITE)):
                keys = self.fleet.folder / f"keys-{name}"
                found(keys, name, ["localhost"], port, 3)
                for member in members:
                    enrol(keys, self.fleet.folder / f"id-{member}", member)
        for seed, device in enumerate(SITE, 3):
            self.fleet.write_data(device, seed)

    def identity(self, folder, table="identity"):
        return f'[{table}]\nfolder = "{folder}"\n' if self.keyed else ""

    def begin(self):
        """The fleet above with its own devices, the gateway, and the site's devices once there is a broker for them."""
        self.above = self.fleet.serve()
        self.url = self.above.wait_for("ready")["broker"]
        self.direct = self.agents(self.url, "watch", DIRECT)
        self.gateway = self.serve_site()
        self.site = self.agents(self.gateway.wait_for("ready")["broker"], "garden", SITE)

    def serve_site(self):
        path = self.fleet.folder / "site.toml"
        path.write_text(
            f"""
[fleet]
name = "garden"
members = {json.dumps(SITE)}
state = "site"
stay = {self.stay}
[broker]
url = "mosquitto"
port = {self.port}
{self.identity("keys-garden")}
[rounds]
deadline_s = 120
quorum = 1.0
retry_s = 0.3
[upstream.device]
id = "site"
[upstream.fleet]
name = "watch"
broker = "{self.url}"
retry_s = 0.3
{self.identity("id-site", "upstream.identity")}
"""
        )
        return self.fleet._start("gateway", "run", path, "--json")

    def agents(self, url, name, devices):
        files = []
        for device in devices:
            files.append(self.fleet.device_config(device, url))
            text = files[-1].read_text().replace('name = "watch"', f'name = "{name}"')
            files[-1].write_text(text + self.identity(f"id-{device}"))
        return self.fleet._start("edge", "run", *files, "--json")

    def finish(self):
        for program in (self.site, self.gateway, self.direct, self.above):
            assert program.end() == 0, (program.errors, program.events[-12:])

    def members(self):
        found = {}
        for name in (*DIRECT, *SITE):
            data, widths = NpzSource(self.fleet.folder / f"{name}.npz").load(), self.widths.get(name)
            found[name] = Member(name, data.train, data.val, Plan(widths=widths) if widths else None)
        return found

    def learned_in_process(self):
        """Global model and private states of the same rounds by plain functions. In each of them, what the site adds is
        within its roundings of what its devices would have."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        members, private = self.members(), {}
        shared, server = rounds.start(self.run)
        for round in range(1, self.run.rounds + 1):
            updates = {}
            for name, member in members.items():
                updates[name], private[name] = rounds.participate(self.run, member, shared, private.get(name), round)
            flat, _ = rounds.close(self.run, shared, server, [updates[name] for name in sorted(updates)])
            total = partial_sum(shared, [updates[name] for name in SITE], "site")
            alone = [updates[name] for name in DIRECT]
            after, server = rounds.close(self.run, shared, server, [*alone, *total.updates()])
            for key, value in flat.items():
                sizes = [np.abs(one.tensors[key]).max(initial=0) for one in updates.values() if key in one.tensors]
                scale = np.abs(shared[key]).max(initial=0) + max(sizes, default=0)
                assert roundings(after[key], value, scale=scale) <= 1.5 + 1e-6, key
            shared = after
        torch.set_num_threads(threads)
        return shared, private

    def private(self, device):
        name = "garden" if device in SITE else "watch"
        with DeviceStore(self.fleet.state_of(device), name, device) as store:
            return store.private().tensors

    def counted(self, folder, name):
        """By round, whose updates counted; the record is whole."""
        with Store(self.fleet.folder / folder / "coordinator.db") as store:
            assert fsck.check(store, FolderBlobs(self.fleet.folder / folder / "blobs")).damage == ()
            return {
                row.round: [who for _, who in row.counted] for row in store.attempts.of(name) if row.failure is None
            }

    def learned_the_same(self):
        shared, private = self.learned_in_process()
        assert tensors.equal(self.fleet.shared(), shared)
        for device in private:
            assert tensors.equal(self.private(device), private[device]), device
        every = range(1, self.run.rounds + 1)
        assert self.counted("state", "watch") == {round: [*DIRECT, "site"] for round in every}
        assert self.counted("site", "garden") == {round: list(SITE) for round in every}


def test_a_site_learns_with_the_fleet_above_as_its_devices_would(fleet, a_run, command):
    run = a_run("hermes", threshold=0.0)
    sizes = run_model.layout_of(run.spec).sizes
    one = WithSite(fleet, run, {"carl": {g: max(8, n // 2) for g, n in sizes.items()}})
    one.begin()
    one.finish()
    one.learned_the_same()
    closed = [event for event in one.above.events if event["event"] == "round-closed"]
    assert [(event["counted"], event["clients"]) for event in closed] == [(3, 5)] * run.rounds
    status, out, _ = command("coordinator", "status", one.fleet.config, "--json")
    assert {(row["counted"], row["clients"]) for row in json.loads(out)["history"]} == {(3, 5)}
    status, out, _ = command("coordinator", "status", one.fleet.config)
    assert (status, out.count("3 (5)")) == (0, run.rounds)
    narrow = [event for event in one.site.events if event["event"] == "model" and event.get("part")]
    assert {event["device"] for event in narrow} >= {"carl"}, "a site's device downloads what it keeps"
    for device in (*SITE, *DIRECT):
        assert json.loads((one.fleet.state_of(device) / "result.json").read_text())["rounds"] == run.rounds


def test_a_gateway_is_killed_in_every_round(fleet, a_run):
    one = WithSite(fleet, a_run("fedper", rounds=4, epochs=3), more="[ingest]\nworkers = 1\n")
    one.begin()
    for round, moment in ((1, "round-opened"), (2, "summed"), (3, "received")):
        one.gateway.wait_for(moment, round=round)
        one.gateway.kill()
        one.gateway = one.serve_site()
    one.gateway.wait_for("started")
    one.gateway.process.terminate()
    assert one.gateway.end() == 0, one.gateway.errors
    one.gateway = one.serve_site()
    one.finish()
    one.learned_the_same()


def test_with_keys_on_both_links_a_run_goes_on_for_longer_and_the_site_with_it(fleet, a_run, command):
    one = WithSite(fleet, a_run("fedper", rounds=2), keyed=True)
    one.begin()
    one.above.wait_for("round-opened", round=1)
    given(load_config(one.fleet.config), Order("extend", rounds=1))
    assert one.gateway.wait_for("started", rounds=3)["fleet"] == "garden"
    site = load_config(one.fleet.folder / "site.toml")  # as the commands of `talaria coordinator` read it
    with pytest.raises(ConfigError, match="extend: this is a site; how long it learns"):
        given(site, Order("extend", rounds=1))
    one.finish()
    one.run = one.fleet.run = replace(one.run, rounds=3)
    one.learned_the_same()
    again = one.serve_site()  # nobody is above any more
    assert again.wait_for("started")["round"] == 3
    again.close()
    status, out, _ = command("coordinator", "status", one.fleet.folder / "site.toml", "--json")
    assert (status, json.loads(out)["round"]) == (0, 3)
    status, _, errors = command("coordinator", "serve", one.fleet.folder / "site.toml")
    assert status == 1
    assert "`talaria gateway run` serves it" in errors


def test_a_site_that_serves_on_learns_the_rounds_that_a_whole_run_goes_on_for(fleet, a_run):
    """It said again, of the first of them, what it had said of the final model: nothing. No sum of it went up."""
    one = WithSite(fleet, a_run("fedper", rounds=1))
    one.stay = "true"
    one.begin()
    one.gateway.wait_for("done", device="site")
    assert (one.site.end(), one.direct.end()) == (0, 0)
    one.above.process.terminate()
    assert one.above.end() == 0
    given(load_config(one.fleet.config), Order("extend", rounds=1))
    one.above = one.fleet.serve()
    assert one.above.wait_for("ready")["broker"] == one.url
    one.direct = one.agents(one.url, "watch", DIRECT)
    one.site = one.agents(one.gateway.wait_for("ready")["broker"], "garden", SITE)
    one.gateway.wait_for("done", device="site")
    assert one.site.end() == 0
    one.gateway.process.terminate()
    assert [program.end() for program in (one.gateway, one.direct, one.above)] == [0, 0, 0]
    one.run = one.fleet.run = replace(one.run, rounds=2)
    one.learned_the_same()


def test_another_run_above_asks_for_another_folder_of_the_site_and_nothing_else(fleet, a_run):
    one = WithSite(fleet, a_run("fedper", rounds=1))
    one.begin()
    one.finish()
    given(load_config(one.fleet.config), Order("next", rounds=1))
    one.above = one.fleet.serve()
    one.url = one.above.wait_for("ready")["broker"]
    gateway = one.serve_site()
    assert gateway.end() == 1
    assert "give the site another folder for it, as [fleet] state" in gateway.errors
    one.above.close()
    (one.fleet.folder / "site").rename(one.fleet.folder / "site-before")
    one.begin()
    one.finish()
    assert one.counted("state", "watch")[2] == [*DIRECT, "site"]
    assert one.counted("site", "garden")[2] == list(SITE)
    for device in SITE:
        with DeviceStore(one.fleet.state_of(device), "garden", device) as store:
            assert (store.private().round, store.before().round) == (2, 1)


def test_a_gateway_whose_fleet_is_away_ends_when_it_is_told_to(fleet, a_run):
    one = WithSite(fleet, a_run())
    one.url = f"mqtt://127.0.0.1:{free_port()}"
    gateway = one.serve_site()
    gateway.wait_for("unreachable")
    gateway.process.terminate()
    assert gateway.end() == 0, gateway.errors
