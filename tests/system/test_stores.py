"""A coordinator that keeps its state in PostgreSQL and its global models in a bucket, killed in the middle of a run."""

import json
from uuid import uuid4

from servers import BUCKET, PASSWORD

from talaria import tensors
from talaria_coordinator.storage.s3 import S3Blobs


def test_a_fleet_on_postgresql_and_s3_survives_a_kill_and_learns_what_simulation_learns(
    fleet, a_run, postgres, s3, command
):
    one = fleet(a_run("fedavg", rounds=3))
    database, blobs = postgres.database(), f"s3://{BUCKET}/{uuid4().hex}"
    (one.folder / "database.password").write_text(f"{PASSWORD}\n")
    (one.folder / "database.password").chmod(0o600)
    url = f"postgresql+psycopg://talaria@127.0.0.1:{postgres.port}/{database.database}"
    one.extra = (
        f'[store]\ndatabase = {json.dumps(url)}\npassword_file = "database.password"\n'
        f"blobs = {json.dumps(blobs)}\nendpoint = {json.dumps(s3.endpoint)}\n"
    )
    coordinator = one.serve()
    agents = one.agents(coordinator.wait_for("ready")["broker"])
    coordinator.wait_for("round-closed", attempt=1)
    coordinator.kill()
    again = one.serve()
    assert (again.end(), agents.end()) == (0, 0)
    assert not (one.folder / "state" / "coordinator.db").exists()
    assert PASSWORD not in json.dumps(coordinator.events + again.events) + coordinator.errors + again.errors
    assert tensors.equal(one.shared(database, S3Blobs(blobs, endpoint=s3.endpoint)), one.simulated().shared)
    status, said, errors = command("coordinator", "fsck", one.config)
    assert status == 0, said + errors
