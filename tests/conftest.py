"""For all tests: no verdict depends on how fast this machine is just now, servers are real, and none is skipped."""

import gc
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for servers.py and its like, which several folders use

from servers import serving_postgres, serving_s3

gc.disable()  # until all is collected: importing makes no garbage
settings.register_profile("talaria", deadline=None)
settings.register_profile("minutes", deadline=None, max_examples=4000)
settings.load_profile("talaria")

BROKER = {"mosquitto", "make_mosquitto", "fleet", "broker", "keyed"}
"""Fixtures that start a broker."""
LEFT = "ignore:Exception ignored in. <(ssl.SSLSocket|socket.socket):pytest.PytestUnraisableExceptionWarning"
"""paho leaves the sockets by which it wakes its thread, and that of a failed handshake, to the garbage collector."""
BROWSER = {"page", "odd"}

SLOW = (
    "tests/coordinator", "tests/edge_client", "tests/export", "tests/hostile", "tests/system",
    "tests/test_no_pickle.py",
    "tests/sdk/aggregate/test_byzantine.py", "tests/sdk/algorithms/test_ffgg.py",
    "tests/sdk/algorithms/test_trajectories.py",
    "tests/sdk/planning/test_latency_model.py",
    "tests/sdk/planning/test_width_schedule.py", "tests/sdk/planning/test_planner_bench.py",
    "tests/sdk/planning/test_device_cli.py",
    "tests/sdk/planning/test_planner.py", "tests/sdk/planning/test_foreign_models.py",
    "tests/sdk/model/test_any_network.py", "tests/sdk/model/test_zoo.py",
    "tests/sdk/simulation", "tests/sdk/data", "tests/sdk/training/test_frozen_features.py",
    "tests/bench/test_fuzz.py", "tests/sdk/test_personalizer.py",
    "tests/sdk/algorithms/test_fedrep.py::test_linear_body_finds_the_common_subspace",
    "tests/sdk/algorithms/test_hermes.py::test_a_subnetwork_of_half_the_parameters_is_worth",
    "tests/sdk/algorithms/test_hermes.py::test_devices_with_other_labels_keep_other_channels",
    "tests/sdk/algorithms/test_hermes.py::test_fine_tuning_that_costs_accuracy_is_not_served",
    "tests/sdk/algorithms/test_hermes.py::test_the_gate_opens_where_everybodys_average_fits_nobody",
    "tests/sdk/algorithms/test_perfedavg.py::test_it_learns_a_better_start_than_its_own_average",
    "tests/sdk/programs/test_hostile.py",
    "tests/sdk/programs/test_shapes.py::test_the_table_foresees_every_value",
    "tests/sdk/cli/test_missing_packages.py",
    "tests/sdk/federated/test_kit.py::test_equal_runs_give_equal_files_in_any_process",
    "tests/sdk/federated/test_kit.py::test_every_algorithm_learns_and_serves_from_a_kit",
    "tests/sdk/algorithms/test_classic_conditions.py", "tests/sdk/algorithms/test_classic_defects.py",
    "tests/sdk/algorithms/test_reductions.py", "tests/sdk/programs/test_exact.py",
    "tests/sdk/federated/test_blueprint.py::test_a_process_of_its_own_gives_the_same_bytes",
    "tests/sdk/federated/test_blueprint.py::test_models_of_ones_own_are_found_where_this_process_finds_them",
    "tests/sdk/federated/test_blueprint.py::test_what_the_run_is_to_blame_for_is_said_as_this_process_would_say_it",
    "tests/sdk/training/test_sgd.py::test_training_imports_no_optimizer_of_torch",
    "tests/sdk/algorithms/test_thorki.py::test_one_graph_with_both_branches_and_the_gate_exports",
    "tests/sdk/planning/test_layer_stats.py::test_shapes_are_those_of_the_compact_model[resnet18]",
    "tests/sdk/test_plugins.py::test_the_command_takes_a_package_of_ones_own",
    "tests/sdk/test_plugins.py::test_nothing_in_the_current_folder_takes_the_place_of_what_is_installed",
    "tests/laws/test_algorithm_laws.py::test_the_personal_model_exports",
)  # fmt: skip
"""Files and tests that ``make quick`` leaves to ``make test``: they take seconds each, as what learns for many rounds
does, or are no part of the inner loop."""
QUICK_LAWS = {"fedavg", "hermes", "pfedgm"}
"""The algorithms whose laws ``make quick`` looks at: a plain one, one with masks, one with statistics."""

WAITS = ("tests/system", "tests/hostile", "tests/coordinator", "tests/sdk/wire/test_mqtt.py")
"""Files that wait for processes, sockets and deadlines more than they compute."""
LONG = (
    "tests/laws/test_algorithm_laws.py", "tests/system/test_secure_fleet.py", "tests/system/test_in_process.py",
    "tests/hostile/test_liars.py", "tests/system/test_without_torch.py", "tests/system/test_demo.py",
    "tests/system/test_living.py", "tests/system/test_story.py", "tests/system/test_history.py",
    "tests/export/test_matrix.py", "tests/system/test_gateway.py",
    "tests/coordinator/test_store.py", "tests/system/test_load.py", "tests/system/test_identity.py",
    "tests/system/test_node_device.py", "tests/bench/test_simulation.py", "tests/system/test_every_algorithm.py",
    "tests/system/test_readme.py", "tests/test_docs.py", "tests/sdk/planning/test_planner.py",
    "tests/coordinator/test_api.py", "tests/coordinator/test_blobs.py", "tests/coordinator/test_maintenance.py",
    "tests/system/test_chaos.py", "tests/system/test_crashes.py", "tests/system/test_broker_abuse.py",
    "tests/system/test_tasks_over_mqtt.py", "tests/hostile/test_siege_messages.py",
    "tests/sdk/algorithms/test_trajectories.py", "tests/sdk/programs/test_parity.py",
    "tests/coordinator/test_connection_limits.py", "tests/bench/test_export.py", "tests/system/test_disasters.py",
    "tests/sdk/test_plugins.py", "tests/system/test_link_disasters.py", "tests/sdk/wire/test_mqtt.py",
    "tests/hostile/test_siege_uploads.py", "tests/sdk/algorithms/test_hermes.py", "tests/system/test_same_bytes.py",
    "tests/export/test_served.py", "tests/sdk/federated/test_kit.py", "tests/system/test_operator.py",
    "tests/coordinator/test_migrations.py", "tests/sdk/algorithms/test_ffgg.py",
    "tests/system/test_silent_database.py", "tests/sdk/planning/test_latency_model.py",
    "tests/system/test_failures.py", "tests/system/test_wheel.py", "tests/system/test_stranger.py",
    "tests/edge_client/test_deploy.py", "tests/system/test_stores.py", "tests/sdk/planning/test_foreign_models.py",
    "tests/sdk/simulation/test_experiment.py", "tests/laws/test_aggregator_laws.py",
    "tests/sdk/model/test_any_network.py", "tests/sdk/programs/test_hostile.py", "tests/sdk/model/test_zoo.py",
    "tests/system/test_broker_disasters.py", "tests/system/test_check.py", "tests/export/test_beyond_python.py",
    "tests/export/test_predictor.py", "tests/system/test_front_doors.py",
)  # fmt: skip
"""Files that take longest, in that order: one that begins last would keep all others waiting."""


def pytest_collection_modifyitems(items):
    for item in items:
        names, path = set(item.fixturenames), _path(item)
        if names & BROKER:
            item.add_marker("broker")
            item.add_marker(pytest.mark.filterwarnings(LEFT))
        if "postgres" in names or "postgres" in item.name:
            item.add_marker("postgres")
        if names & BROWSER:
            item.add_marker("browser")
        algorithm = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if item.nodeid.startswith(SLOW) or (
            path == "tests/laws/test_algorithm_laws.py" and algorithm not in QUICK_LAWS
        ):
            item.add_marker("slow")
    items[:] = _mixed(items)


def pytest_collection_finish():
    """What was imported and collected is never garbage: it is not looked through again and again. Nor is what a test
    makes as often as Python would: that took a twelfth of the suite."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_ignore_collect(collection_path, config):
    """What ``make quick`` leaves out is not even imported there: that costs each of its processes seconds."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    if path.startswith("tests/flower") and find_spec("flwr") is None:
        return True  # flwr asks for older packages than constraints.txt has: `make flower` has a venv for these
    if "not slow" in config.option.markexpr and path.startswith(SLOW):
        return True
    return None


def _path(item):
    return item.nodeid.partition("::")[0]


def _mixed(items):
    """Whole files, the longest first, those that wait and those that compute by turns: so few wait at the same time."""
    files = {}
    for item in items:
        files.setdefault(_path(item), []).append(item)
    order = sorted(files, key=lambda f: LONG.index(f) if f in LONG else len(LONG))
    waiting = [f for f in order if f.startswith(WAITS)]
    busy = [f for f in order if not f.startswith(WAITS)]
    mixed = [f for pair in zip(waiting, busy, strict=False) for f in pair]
    return [item for f in dict.fromkeys([*mixed, *order]) for item in files[f]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A broker, a browser or a database that is missing fails its tests: what is skipped is not noticed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} would be skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server, one for each test process."""
    with serving_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def s3():
    """An S3 server, one for each test process, and keys for it in the environment."""
    with serving_s3() as server:
        yield server
