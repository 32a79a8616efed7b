import numpy as np
import pytest
import torch

from talaria.errors import ConfigError
from talaria_export import Predictor, export_onnx, make_bundle
from talaria_export.preprocess import Normalized, Windowed
from talaria_export.session import Session


def test_normalization_travels_inside_the_bundle(imu, tmp_path):
    mean, std = torch.arange(6.0)[:, None], torch.arange(1.0, 7.0)[:, None]
    path = tmp_path / "raw.talaria"
    make_bundle(path, Normalized(imu.model, mean, std), example=imu.x, variants=("fp32",), seconds=0)
    with torch.no_grad():
        expected = imu.model(imu.x).numpy()
    np.testing.assert_allclose(Predictor(path)(imu.x * std + mean).logits, expected, atol=1e-4)


@pytest.mark.parametrize("length", [100, 149, 150, 517])
def test_recording_of_any_length_is_cut_inside_the_graph(imu, windowed, length):
    recording = torch.randn(length, 6, generator=torch.Generator().manual_seed(length))
    windows = recording.T.unfold(1, 100, 50).permute(1, 0, 2)
    with torch.no_grad():
        expected = imu.model(windows).numpy()
    answer = Session(windowed)(recording.numpy())
    assert answer.shape == ((length - 100) // 50 + 1, 7)
    np.testing.assert_allclose(answer, expected, atol=1e-5)


@pytest.fixture(scope="module")
def windowed(imu) -> bytes:
    return export_onnx(Windowed(imu.model, 100, 50), torch.zeros(300, 6))


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (float("nan"), 1.0), (0.0, [1.0, -1.0]), (0.0, float("inf"))])
def test_normalization_without_a_meaning_is_refused(imu, mean, std):
    with pytest.raises(ConfigError, match="normalization"):
        Normalized(imu.model, torch.tensor(mean), torch.tensor(std))


def test_windows_without_a_length_are_refused(imu):
    with pytest.raises(ConfigError, match="stride"):
        Windowed(imu.model, 100, 0)
