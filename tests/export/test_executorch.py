"""ExecuTorch programs. The package is large and optional, so both of its states are tested by what is there."""

import hashlib
import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tolerance import roundings

from talaria.errors import BundleError, ConfigError
from talaria_export import Predictor, make_bundle, open_bundle, verify_bundle
from talaria_export.bundle.bundle import read_bundle, seal
from talaria_export.convert.executorch import export_pte

HERE = find_spec("executorch") is not None


def test_program_agrees_with_torch_or_the_package_is_named(imu, tmp_path):
    path = tmp_path / "me.pte"
    if HERE:
        data = export_pte(imu.model, imu.x, path)
        assert path.read_bytes() == data
        assert len(data) < 1.3 * 4 * sum(p.numel() for p in imu.model.parameters())
    else:
        with pytest.raises(ConfigError, match=r"talaria\[executorch\]"):
            export_pte(imu.model, imu.x, path)
        assert not path.exists()


def test_program_is_a_member_of_the_bundle_or_the_package_is_named(imu, tmp_path):
    path = tmp_path / "me.talaria"
    options = {"example": imu.x, "variants": ("fp32",), "normalize": (2.0, 3.0), "stride": 50, "seconds": 0}
    if not HERE:
        with pytest.raises(ConfigError, match=r"talaria\[executorch\]"):
            make_bundle(path, imu.model, executorch=True, **options)
        assert not path.exists()
        return
    make_bundle(path, imu.model, executorch=True, **options)
    from executorch.runtime import Runtime

    opened = open_bundle(path)
    (row,) = opened.manifest["programs"]
    data = bytes(opened.members[row["file"]])
    assert opened.manifest["files"][row["file"]]["sha256"] == hashlib.sha256(data).hexdigest()
    assert row["max_abs_diff"] <= 1e-4
    assert row["takes"] == [1, 6, 100]
    assert row["runtime"].startswith("executorch ")
    method = Runtime.get().load_program(data).load_method("forward")
    window = imu.x[:1] * 3 + 2
    answer = method.execute([window.contiguous()])[0].numpy()
    assert roundings(answer, Predictor(path)(window[0].T).logits) <= 1000
    assert verify_bundle(path, seconds=0).ok


def written(bundle, target, change):
    """The bundle with a program of some bytes; the manifest's row of it is changed."""
    opened = read_bundle(bundle.read_bytes())
    manifest = {k: v for k, v in json.loads(json.dumps(dict(opened.manifest))).items() if k != "files"}
    row = {"name": "xnnpack", "file": "programs/xnnpack.pte", "bytes": 4, "runtime": "x 1", "max_abs_diff": 0.0}
    manifest["programs"] = [row | change]
    members = {k: bytes(v) for k, v in opened.members.items()} | {"programs/xnnpack.pte": b"1234"}
    target.write_bytes(seal(manifest, members))


def test_program_is_no_business_of_the_predictor(bundle, imu, tmp_path):
    """A bundle with a program in it is read, hashed and served where ExecuTorch is not installed."""
    path = tmp_path / "with.talaria"
    written(bundle, path, {})
    assert np.array_equal(Predictor(path)(imu.x).logits, Predictor(bundle)(imu.x).logits)
    assert verify_bundle(path, seconds=0).ok
    with torch.no_grad():
        assert open_bundle(path).members["programs/xnnpack.pte"] == b"1234"


@pytest.mark.parametrize("change", [{"file": "programs/none.pte"}, {"max_abs_diff": "x"}, {"runtime": 1}])
def test_row_of_a_program_that_is_not_there_is_refused(bundle, tmp_path, change):
    with pytest.raises(BundleError, match="programs"):
        written(bundle, tmp_path / "x.talaria", change)
