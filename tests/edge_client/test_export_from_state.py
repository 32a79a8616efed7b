"""``talaria export --state``: a bundle from what a device's agent left, without its runtime."""

import json

import numpy as np
import pytest

from talaria.cli.main import main
from talaria.errors import ModelError, StateError
from talaria.federated import rounds
from talaria.federated.run_model import layout_of
from talaria.planning.plan import Plan
from talaria.training.loop import predict
from talaria_export import Predictor
from talaria_export.build import inputs
from talaria_export.bundle.bundle import open_bundle


def test_the_state_folder_of_a_pruned_device_becomes_a_bundle(
    finished, learned, motions, tmp_path, monkeypatch, capsys
):
    run, _, good = learned
    widths = {g: max(4, n // 2) for g, n in layout_of(run.spec).sizes.items()}
    finished(run, good, plan=Plan(widths=widths), labels=("rest", "walk", "run"))
    model, dense, example, facts = inputs.load_state(tmp_path / "anna")
    assert {g: model.get_submodule(g).weight.shape[0] for g in ("conv1", "conv2")} == {
        g: widths[g] for g in ("conv1", "conv2")
    }
    assert dense.conv1.weight.shape[0] == layout_of(run.spec).sizes["conv1"]
    assert tuple(example.shape[1:]) == run.spec.input_shape
    assert facts["card"]["algorithm"] == "fedavg"

    out = tmp_path / "me.talaria"
    words = ["talaria", "export", "--state", tmp_path / "anna", "-o", out, "--variants", "fp32", "--json"]
    monkeypatch.setattr("sys.argv", [str(w) for w in words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["ok"]
    x = motions(6, 3).x
    expected = predict(model.eval(), x).argmax(1)
    assert list(Predictor(out)(x).labels) == [["rest", "walk", "run"][i] for i in expected.tolist()]
    assert open_bundle(out).manifest["card"]["plan"]["widths"] == widths


def test_a_folder_that_holds_no_finished_model_is_refused(finished, learned, tmp_path):
    with pytest.raises(StateError, match="cannot read"):
        inputs.load_state(tmp_path)
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(2)}, tmp_path / "personal.safetensors")
    with pytest.raises(StateError, match="does not tell its model"):
        inputs.load_state(tmp_path)
    run, _, good = learned
    finished(run, good)
    path = tmp_path / "anna" / "personal.safetensors"
    from talaria_edge.storage import tensor_files

    tensors, facts = tensor_files.unpack(path.read_bytes(), path, "")
    del tensors["head.weight"]
    path.write_bytes(tensor_files.pack(tensors, facts))
    with pytest.raises(ModelError):
        inputs.load_state(tmp_path / "anna")


@pytest.mark.parametrize(("algorithm", "hparams"), [("thorki", {}), ("pfedgm", {"predictive": True})])
def test_of_more_than_the_runs_network_the_agents_bundle_is_named(a_run, finished, tmp_path, algorithm, hparams):
    run = a_run(algorithm, hparams=hparams)
    finished(run, rounds.start(run)[0])
    with pytest.raises(ModelError, match=r"is no plain imu_cnn .* take the bundle that the agent makes"):
        inputs.load_state(tmp_path / "anna")
