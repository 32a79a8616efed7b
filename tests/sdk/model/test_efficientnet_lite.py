"""Published weights are the published ones, and reading them runs nothing that the file says."""

import hashlib
import pickle
import struct

import pytest
import torch

from talaria import tensors
from talaria.errors import ConfigError, StateError
from talaria.model import zoo
from talaria.model.nets import efficientnet_lite, legacy_checkpoint
from talaria.model.spec import ModelSpec
from talaria.model.state import to_arrays

SPEC = ModelSpec("efficientnet_lite0", (3, 224, 224), 1000, pretrained=True)


@pytest.fixture(scope="module")
def pretrained():
    return zoo.build(SPEC).eval()


def test_a_palace_and_a_daisy_are_recognised(pretrained):
    from sklearn.datasets import load_sample_images

    images = torch.stack([torch.tensor(image) for image in load_sample_images().images])
    x = images.permute(0, 3, 1, 2).float()[..., :427, 100:527]
    x = torch.nn.functional.interpolate(x, size=(224, 224), mode="bilinear", antialias=True)
    with torch.no_grad():
        assert pretrained((x - 127) / 128).argmax(1).tolist() == [698, 985]


def test_a_new_head_follows_the_seed_and_the_rest_is_published(pretrained):
    spec = ModelSpec("efficientnet_lite0", (3, 64, 64), 5, pretrained=True)
    model, bare = zoo.build(spec), zoo.build(ModelSpec("efficientnet_lite0", (3, 64, 64), 5))
    published = pretrained.state_dict()
    for key, value in model.state_dict().items():
        want = bare.state_dict()[key] if key.startswith("head.") else published[key]
        assert torch.equal(value, want), key


@pytest.mark.parametrize("size", [(64, 64), (65, 97), (224, 33)])
def test_padding_is_same_for_every_size(size):
    model = zoo.build(ModelSpec("efficientnet_lite0", (3, *size), 3)).eval()
    shape = model.features(torch.zeros(1, 3, *size)).shape
    assert tuple(shape[2:]) == tuple(-(-n // 32) for n in size)


def test_even_sizes_pad_after_and_odd_sizes_around():
    even = efficientnet_lite.lite0((3, 64, 64), 2).features.stem
    odd = efficientnet_lite.lite0((3, 65, 65), 2).features.stem
    assert even.conv_pad.padding == (0, 1, 0, 1)
    assert even.conv.padding == (0, 0)
    assert odd.conv.padding == (1, 1)


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match=r"talaria\[vision\]"):
        zoo.build(SPEC)


def test_a_changed_file_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "changed_weights"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(efficientnet_lite, "PACKAGE", "changed_weights")
    with pytest.raises(StateError, match="cannot read"):
        efficientnet_lite._published()
    (package / efficientnet_lite.FILE).write_bytes(b"short")
    with pytest.raises(StateError, match="bytes long"):
        efficientnet_lite._published()
    (package / efficientnet_lite.FILE).write_bytes(bytes(efficientnet_lite.FILE_BYTES))
    with pytest.raises(StateError, match="sha256"):
        efficientnet_lite._published()


def _old_file(path, state):
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


def test_the_old_format_is_read_as_torch_wrote_it(tmp_path):
    state = {
        "a": torch.randn(3, 4),
        "b": torch.randn(6, 2).t(),
        "c": torch.tensor([1, 2, 3]),
        "d": torch.randn(10)[2:5],
        "e": torch.tensor(5),
    }
    assert tensors.equal(to_arrays(legacy_checkpoint.read(_old_file(tmp_path / "w.pth", state))), to_arrays(state))


class _Attack:
    def __reduce__(self):
        return (open, ("/tmp/talaria-was-here", "w"))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_file_that_asks_for_a_call_is_refused_and_nothing_runs(monkeypatch, protocol):
    head = [pickle.dumps(v, 2) for v in (legacy_checkpoint._MAGIC, legacy_checkpoint._VERSION, {"little_endian": True})]
    data = b"".join([*head, pickle.dumps({"w": _Attack()}, protocol), pickle.dumps([], 2)])
    touched = []
    monkeypatch.setattr("builtins.open", lambda *a, **_: touched.append(a))
    with pytest.raises(StateError):
        legacy_checkpoint.read(data)
    assert touched == []


def test_every_cut_and_lie_is_a_clear_error(tmp_path):
    data = _old_file(tmp_path / "w.pth", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)})
    for cut in range(0, len(data), 7):
        with pytest.raises(StateError):
            legacy_checkpoint.read(data[:cut])
    body = struct.pack("<q", 6) + struct.pack("<6f", *range(6))
    assert body in data
    with pytest.raises(StateError, match="elements"):
        legacy_checkpoint.read(data.replace(body, struct.pack("<q", 1 << 60) + body[8:]))
    larger = data.replace(b"K\x02K\x03\x86", b"K\x09K\x09\x86")
    assert larger != data
    with pytest.raises(StateError, match="fit"):
        legacy_checkpoint.read(larger)


def test_the_file_is_the_one_that_was_looked_at():
    assert hashlib.sha256(efficientnet_lite._published()).hexdigest() == efficientnet_lite.SHA256
