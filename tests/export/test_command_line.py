import json
import sys
from zipfile import ZipFile

import numpy as np
import pytest
import safetensors.numpy
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

import talaria
from talaria.errors import ConfigError, DataError, ModelError, StateError
from talaria.model import masks, pruning, zoo
from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan
from talaria.types import Samples
from talaria_export import cli, open_bundle
from talaria_export.build import build
from talaria_export.bundle.archive import pack, unpack

IMU = ModelSpec("imu_cnn", (6, 100), 7)


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    found = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    for name in ("export", "verify", "predict"):
        found.command(name)(getattr(cli, name))
    return found


def run(app: typer.Typer, *arguments: object):
    """The outcome of a command; what it raises is raised here."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def files(imu, tmp_path_factory):
    """A spec, the weights and the mask of a model with half of its channels, and samples."""
    home = tmp_path_factory.mktemp("files")
    layout = zoo.layout(IMU)
    mask = pruning.choose(pruning.importance(imu.model, layout), layout.full(), keep=0.5)
    small = pruning.compact(imu.model, mask)
    (home / "spec.json").write_text(json.dumps(IMU.to_json()))
    save_file({k: v.contiguous() for k, v in small.state_dict().items()}, home / "weights.safetensors")
    safetensors.numpy.save_file(masks.as_tensors(mask), home / "mask.safetensors")
    np.savez(home / "data.npz", x=imu.x.numpy(), y=imu.y.numpy())
    np.save(home / "x.npy", imu.x[:3].numpy())
    np.savetxt(home / "one.csv", imu.x[0].numpy(), delimiter=",")
    return home


def test_pixels_and_names_of_a_file_are_read_as_a_device_reads_them(app, files, tmp_path, monkeypatch):
    given: list[Samples] = []
    monkeypatch.setattr(build, "make_bundle", lambda *_, samples, **__: given.append(samples) or sys.exit(0))
    x, y = np.random.default_rng(0).integers(0, 256, (40, 6, 100), np.uint8), np.arange(40) % 7
    np.savez(tmp_path / "data.npz", x=x, y=np.array([*"abcdefg"])[y])
    where = ("--spec", files / "spec.json", "--weights", files / "weights.safetensors", "--data", tmp_path / "data.npz")
    run(app, "export", *where, "--mask", files / "mask.safetensors", "--labels", "a,b,c,d,e,f,g")
    assert np.array_equal(given[0].x, x.astype(np.float32) / np.float32(255))
    assert np.array_equal(given[0].y, y)
    with pytest.raises(DataError, match="y holds names of classes; say by --labels in which order"):
        run(app, "export", *where, "--mask", files / "mask.safetensors")


def test_pruned_model_is_exported_from_files_verified_and_run(app, files, tmp_path):
    out = tmp_path / "me.talaria"
    done = run(
        app, "export", "--spec", files / "spec.json", "--weights", files / "weights.safetensors",
        "--mask", files / "mask.safetensors", "--data", files / "data.npz", "--labels", "a,b,c,d,e,f,g", "-o", out,
        "--variants", "fp32,fp16", "--accuracy-drop", "1", "--json",
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert figures["ok"]
    assert out.stat().st_mode & 0o777 == 0o600  # a personal head is nobody else's to read
    assert figures["model_bytes"] < 0.4 * figures["dense_bytes"]
    assert open_bundle(out).labels == tuple("abcdefg")

    shown = run(app, "verify", out, "--data", files / "data.npz", "--seconds", "0")
    assert shown.exit_code == 0
    assert "ok" in shown.stdout
    np.save(tmp_path / "pixels.npy", np.arange(600, dtype=np.uint8).reshape(6, 100))
    np.save(tmp_path / "shares.npy", np.load(tmp_path / "pixels.npy") / np.float32(255))
    told = [run(app, "predict", out, tmp_path / f"{name}.npy", "--json").stdout for name in ("pixels", "shares")]
    assert told[0] == told[1]
    answer = json.loads(run(app, "predict", out, files / "x.npy", "--json").stdout)
    assert len(answer) == 3
    assert answer[0]["label"] in "abcdefg"
    assert sum(answer[0]["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert run(app, "predict", out, files / "one.csv").stdout.startswith(answer[0]["label"])


def test_what_an_option_would_leave_out_without_a_word_is_refused(app, files, tmp_path):
    model = (
        "--spec",
        files / "spec.json",
        "--weights",
        files / "weights.safetensors",
        "--mask",
        files / "mask.safetensors",
    )
    command = ("export", *model, "-o", tmp_path / "me.talaria", "--variants", "fp32")
    with pytest.raises(ConfigError, match="--run and --client alone"):
        run(app, *command, "--client", "anna")
    with pytest.raises(ConfigError, match="give --data as well"):
        run(app, *command, "--keep-samples")
    with pytest.raises(ConfigError, match="labels: 1 has no name"):
        run(app, *command, "--labels", "a,,c,d,e,f,g")
    run(app, *command, "--labels", "a, b, c, d, e, f, g")
    assert open_bundle(tmp_path / "me.talaria").labels == tuple("abcdefg")
    for seconds in ("-1", "nan"):
        with pytest.raises(ConfigError, match=f"seconds={float(seconds)} must be at least 0"):
            run(app, "verify", tmp_path / "me.talaria", "--seconds", seconds)


def test_raw_recording_is_cut_by_the_bundle(app, files, imu, tmp_path):
    out, moments = tmp_path / "me.talaria", tmp_path / "moments.json"
    moments.write_text(json.dumps({"mean": [1.0] * 6, "std": 2.0}))
    command = (
        "export", "--spec", files / "spec.json", "--weights", files / "weights.safetensors", "--mask",
        files / "mask.safetensors", "-o", out, "--variants", "fp32", "--normalize", moments, "--stride", "40",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="6 means and 1 deviations"):
        run(app, *command)
    moments.write_text(json.dumps({"mean": [1.0] * 6}))
    with pytest.raises(ConfigError, match="needs mean and std"):
        run(app, *command)
    moments.write_text(json.dumps({"mean": 1.0, "std": 2.0}))
    run(app, *command)
    recording = np.concatenate([imu.x[0].numpy().T, imu.x[1].numpy().T]) * 2 + 1
    np.savetxt(tmp_path / "recording.csv", recording, delimiter=",")
    answer = json.loads(run(app, "predict", out, tmp_path / "recording.csv", "--json").stdout)
    assert [row["begin"] for row in answer] == [0, 40, 80]
    lines = run(app, "predict", out, tmp_path / "recording.csv").stdout.splitlines()
    assert [line.split("\t")[:2] for line in lines] == [[str(row["begin"]), row["label"]] for row in answer]
    np.savez(tmp_path / "raw.npz", x=imu.x.numpy() * 2 + 1, y=imu.y.numpy())
    report = json.loads(run(app, "verify", out, "--data", f"npz:{tmp_path / 'raw.npz'}", "--json").stdout)[0]
    assert report["ok"]
    assert report["agreement"] == 1.0
    assert report["latency_ratio"] > 0


def test_a_table_that_holds_more_than_numbers_is_refused_by_its_place(app, bundle, files, tmp_path):
    table = tmp_path / "one.csv"
    rows = (files / "one.csv").read_text()
    for text, says in (
        ("ax,ay\n" + rows, "'ax' .* at row 0.*no line of names"),
        (rows.replace("\n", "\n,", 1), "columns changed .* at row 2"),
        (rows.replace(",", ";"), "commas between them"),
        ("", "no data"),
    ):
        table.write_text(text)
        with pytest.raises(DataError, match=f"one.csv: .*{says}"):
            run(app, "predict", bundle, table)
    table.write_text("\ufeff" + rows, encoding="utf-8")  # as a spreadsheet saves it
    shouted = tmp_path / "ONE.CSV"
    shouted.write_text(rows.replace("\n", "\r\n"))
    answer = run(app, "predict", bundle, files / "one.csv").stdout
    for one in (table, shouted):
        assert run(app, "predict", bundle, one).stdout == answer


def test_verify_takes_many_files_and_fails_if_one_does(app, bundle, tmp_path):
    bad = tmp_path / "bad.talaria"
    bad.write_bytes(bundle.read_bytes()[:-9])
    assert run(app, "verify", bundle, bundle, "--seconds", "0").exit_code == 0
    done = run(app, "verify", bundle, bad, "--seconds", "0", "--json")
    assert done.exit_code == 1
    reports = json.loads(done.stdout)
    assert [report["ok"] for report in reports] == [True, False]
    shown = run(app, "verify", bundle, bad, "--seconds", "0")
    assert shown.exit_code == 1
    assert "FAILED" in shown.stdout
    assert "integrity" in shown.stdout


def test_signature_is_made_and_asked_for(app, files, tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    (tmp_path / "key").write_bytes(key.private_bytes_raw())
    out = tmp_path / "me.talaria"
    run(
        app, "export", "--spec", files / "spec.json", "--weights", files / "weights.safetensors",
        "--mask", files / "mask.safetensors", "-o", out, "--variants", "fp32", "--sign", tmp_path / "key",
    )  # fmt: skip
    mine = key.public_key().public_bytes_raw().hex()
    assert run(app, "verify", out, "--trust", mine, "--seconds", "0").exit_code == 0
    assert run(app, "verify", out, "--trust", "11" * 32, "--seconds", "0").exit_code == 1
    with pytest.raises(ConfigError, match="trust"):
        run(app, "verify", out, "--trust", "nonsense")


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        ({"--spec": "none.json"}, ConfigError, "none.json"),
        ({"--spec": "x.npy"}, ConfigError, "JSON"),
        ({"--weights": "none.safetensors"}, StateError, "none.safetensors"),
        ({"--weights": "x.npy"}, StateError, "x.npy"),
        ({"--mask": "weights.safetensors"}, ModelError, "mask"),
        ({"--data": "none.npz"}, DataError, "none.npz"),
        ({"--data": "x.npy"}, DataError, "x.npy"),
        ({"--card": "x.npy"}, ConfigError, "x.npy"),
        ({"--sign": "none"}, ConfigError, "none"),
        ({"--variants": "fp64"}, ConfigError, "fp64"),
        ({"--agreement": "2"}, ConfigError, "agreement"),
    ],
)
def test_wrong_files_and_options_are_named(app, files, tmp_path, change, kind, word):
    options = {"--spec": "spec.json", "--weights": "weights.safetensors", "--mask": "mask.safetensors"} | change
    arguments: list[object] = []
    for name, value in options.items():
        arguments += [name, value if name in ("--variants", "--agreement") else files / value]
    with pytest.raises(kind, match=word):
        run(app, "export", *arguments, "-o", tmp_path / "x.talaria")
    assert list(tmp_path.iterdir()) == []


def test_pruned_weights_without_their_mask_are_refused(app, files, tmp_path):
    with pytest.raises(ModelError, match="mask"):
        run(
            app, "export", "--spec", files / "spec.json", "--weights", files / "weights.safetensors",
            "-o", tmp_path / "x.talaria",
        )  # fmt: skip


def test_input_with_objects_inside_is_not_unpickled(app, bundle, tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="numbers"):
        run(app, "predict", bundle, tmp_path / "x.npy")


def test_a_label_begins_no_line_of_its_own_and_steers_no_terminal(app, bundle, tmp_path):
    """A bundle says what its maker wrote."""
    found = {name: bytes(content) for name, content in unpack(bundle.read_bytes()).items()}
    manifest = json.loads(found["manifest.json"])
    labels = ["\x1b[31mred\nforged\t1.000" for _ in manifest["output"]["labels"] or range(7)]
    manifest["output"]["labels"] = [f"{label}{n}" for n, label in enumerate(labels)]
    path, x = tmp_path / "forged.talaria", tmp_path / "x.npy"
    path.write_bytes(pack({**found, "manifest.json": json.dumps(manifest).encode()}))
    np.save(x, np.zeros(manifest["input"]["shape"], np.float32))
    told = run(app, "predict", path, x).stdout
    assert told.count("\n") == 1
    assert told.rstrip("\n").isascii()
    assert "\x1b" not in told
    assert "red\\nforged" in told


def test_arrays_by_name_are_not_called_damaged(app, bundle, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 3), np.float32))
    with pytest.raises(
        DataError, match=r"x\.npz: holds arrays by name; give the one to answer for: numpy\.save\('x', x\)"
    ):
        run(app, "predict", bundle, tmp_path / "x.npz")


@pytest.mark.parametrize("command", ["export", "verify", "predict"])
def test_help_explains_every_option(app, command):
    shown = run(app, command, "--help").stdout
    assert "--json" in shown
    assert len(shown.splitlines()) > 10


def test_adapted_model_without_a_mask(app, tmp_path):
    from talaria.model.spec import AdapterSpec

    spec = ModelSpec("mlp", (4, 5), 3, adapters=AdapterSpec("lowrank", rank=2))
    model = zoo.build(spec)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_json()))
    save_file(dict(model.state_dict()), tmp_path / "w.safetensors")
    done = run(
        app, "export", "--spec", tmp_path / "spec.json", "--weights", tmp_path / "w.safetensors",
        "-o", tmp_path / "me.talaria", "--variants", "fp32",
    )  # fmt: skip
    assert "default fp32" in done.stdout


def test_the_bundle_of_a_simulated_client_is_stored_as_its_plan_says(app, tmp_path):
    y = np.tile([0, 1], 40)
    x = np.random.default_rng(0).normal(size=(80, 6)) + 3 * y[:, None]
    np.savez(tmp_path / "own.npz", x=x.astype(np.float32), y=y, client=np.repeat(["anna", "bela"], 40))
    saved, plans = tmp_path / "run", {"anna": Plan(precision="fp16")}
    talaria.simulate("fedper", f"npz:{tmp_path / 'own.npz'}", "mlp", rounds=1, plans=plans, save=saved)
    for client, held in (("anna", ["models/fp16.onnx"]), ("bela", ["models/fp32.onnx"])):
        out = tmp_path / f"{client}.talaria"
        run(app, "export", "--run", saved, "--client", client, "-o", out, "--variants", "fp32,fp16")
        with ZipFile(out) as file:
            models = [name for name in file.namelist() if name.startswith("models/")]
        assert models == held or (client, *models) == ("bela", *held, "models/fp16.onnx")  # the faster one beside it
        plan = plans.get(client)
        assert open_bundle(out).manifest["card"]["plan"] == (plan and plan.to_json())


def test_the_model_of_a_simulated_client_is_exported_and_takes_what_was_recorded(app, tmp_path):
    rng = np.random.default_rng(0)
    y, client = np.tile(["calm", "moved", "still"], 40), np.repeat(["anna", "bela"], 60)
    x = rng.normal(50, 7, (120, 6)) + 20 * (y == "moved")[:, None] * [1, 0, 0, 0, 0, 0] - 20 * (y == "still")[:, None]
    np.savez(tmp_path / "own.npz", x=x, y=y, client=client)
    np.save(tmp_path / "x.npy", x[:30].astype(np.float32))  # as it was recorded
    saved, out = tmp_path / "run", tmp_path / "anna.talaria"
    talaria.simulate("fedper", f"npz:{tmp_path / 'own.npz'}", "mlp", rounds=3, recipe={"epochs": 4}, save=saved)
    done = run(app, "export", "--run", saved, "--client", "anna", "-o", out, "--variants", "fp32", "--json")
    assert json.loads(done.stdout)["ok"]
    assert open_bundle(out).labels == ("calm", "moved", "still")
    found = json.loads(run(app, "predict", out, tmp_path / "x.npy", "--json").stdout)
    assert np.mean([one["label"] == label for one, label in zip(found, y[:30], strict=True)]) > 0.8
    with pytest.raises(ConfigError, match="client='carl' is none of this run; choose one of anna, bela"):
        run(app, "export", "--run", saved, "--client", "carl")
    with pytest.raises(ConfigError, match="--run and --client alone"):
        run(app, "export", "--run", saved)
    with pytest.raises(ConfigError, match=r"--task regression: .*run learned classification; leave --task out"):
        run(app, "export", "--run", saved, "--client", "anna", "--task", "regression", "-o", out)
    with pytest.raises(ConfigError, match="labels: 'calm' stands there 2 times"):
        run(app, "export", "--run", saved, "--client", "anna", "--labels", "calm,calm,still", "-o", out)
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 7), np.float32), y=np.zeros(4, np.int64))
    with pytest.raises(DataError, match=r"samples: x has shape \(4, 7\), and the model takes \(N, 6\)"):
        run(app, "export", "--run", saved, "--client", "anna", "--data", tmp_path / "wide.npz", "-o", out)
    assert open_bundle(out).labels == ("calm", "moved", "still")  # what was there before stays
    (saved / "result.json").unlink()
    with pytest.raises(StateError, match=r"not over; go on with it first: talaria simulate --resume"):
        run(app, "export", "--run", saved, "--client", "anna")
