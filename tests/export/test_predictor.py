import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tolerance import roundings
from torch import nn

from talaria.errors import BundleError, ConfigError, DataError, StateError
from talaria_export import Predictor, make_bundle, open_bundle
from talaria_export.bundle.bundle import read_bundle, save, seal


@pytest.fixture(scope="module")
def other(imu, tmp_path_factory) -> Path:
    """The same model with its head negated: another answer to every input."""
    import copy

    model = copy.deepcopy(imu.model)
    with torch.no_grad():
        model.head.weight.neg_()
        model.head.bias.neg_()
    path = tmp_path_factory.mktemp("other") / "other.talaria"
    make_bundle(path, model, example=imu.x, labels=[f"not {c}" for c in "abcdefg"], variants=("fp32",), seconds=0)
    return path


@pytest.fixture
def predictor(bundle) -> Predictor:
    return Predictor(bundle, variant=None)


def test_labels_and_probabilities_of_a_batch(predictor, imu):
    prediction = predictor(imu.x)
    assert prediction.labels == tuple("abcdefg"[i] for i in imu.y)
    assert np.array_equal(prediction.index, imu.y.numpy())
    assert repr(predictor(imu.x[:2])).startswith(f"Prediction(labels={list(prediction.labels[:2])}, bundle='")
    with torch.no_grad():
        expected = imu.model(imu.x).softmax(1).numpy()
    np.testing.assert_allclose(prediction.probabilities, expected, atol=1e-3)
    assert roundings(prediction.probabilities.sum(1), 1) <= 16


def test_a_network_that_ends_in_log_softmax_has_the_probabilities_that_it_says(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3), nn.LogSoftmax(dim=1)).eval()
    x = torch.randn(7, 5)
    make_bundle(tmp_path / "a", model, example=x, labels=list("abc"), variants=("fp32",), seconds=0)
    with torch.no_grad():
        expected = model(x).exp()
    assert roundings(Predictor(tmp_path / "a")(x).probabilities, expected) <= 64


def test_single_input_has_one_label(predictor, imu):
    prediction = predictor(imu.x[0].numpy())
    assert prediction.label == "abcdefg"[imu.y[0]]
    assert prediction.probabilities.shape == (1, 7)
    with pytest.raises(ConfigError, match="labels"):
        _ = predictor(imu.x[:2]).label


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int16])
def test_numbers_of_any_type_are_taken(predictor, imu, kind):
    x = (imu.x[:3].numpy() * 10).astype(kind)
    assert np.array_equal(predictor(x).logits, predictor(x.astype(np.float32)).logits)
    assert np.array_equal(predictor(x.tolist()).logits, predictor(x).logits)
    assert np.array_equal(predictor(np.asfortranarray(x)).logits, predictor(x).logits)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((6, 99)),
        np.zeros((0, 6, 100)),
        np.zeros((1, 1, 6, 100)),
        np.full((6, 100), np.nan),
        np.full((2, 6, 100), np.inf),
        "words",
        [[1.0], [1.0, 2.0]],
        np.zeros((6, 100), dtype="U3"),
        np.zeros((6, 100), dtype=complex),
    ],
    ids=["length", "empty", "rank", "nan", "infinity", "text", "ragged", "strings", "complex"],
)
def test_input_that_does_not_fit_is_refused(predictor, x):
    with pytest.raises(DataError, match="x:"):
        predictor(x)


def test_a_tensor_that_learns_is_taken_for_its_numbers(predictor, imu):
    x = imu.x[:2].clone().requires_grad_()
    assert np.array_equal(predictor(x).logits, predictor(imu.x[:2]).logits)


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_float32_are_refused_without_a_warning(predictor):
    for signs in ([[1.0]], [[1.0, -1.0]]):  # infinities of both signs add up to no number
        with pytest.raises(DataError, match="NaN or infinity"):
            predictor(1e39 * np.tile(signs, (6, 100 // len(signs[0]))))


def test_numbers_too_small_are_0_also_where_numpy_raises(predictor):
    with np.errstate(all="raise"):
        assert predictor(np.full(predictor.shape, 1e-60)).label == predictor(np.zeros(predictor.shape)).label
        sure = replace(predictor(np.zeros(predictor.shape)), logits=np.array([[0, 200]], np.float32))
        assert sure.probabilities.tolist() == [[0, 1]]


def test_large_finite_numbers_are_not_mistaken_for_infinity(predictor):
    assert predictor(np.full((2, 6, 100), 3e37)).logits.shape == (2, 7)


def test_variant_threads_and_provider_can_be_chosen(bundle, imu):
    plain = Predictor(bundle, variant="fp32", threads=2)
    with torch.no_grad():
        assert roundings(plain(imu.x).logits, imu.model(imu.x).numpy()) <= 1000


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"variant": "int4"}, "fp16"),
        ({"threads": 0}, "threads"),
        ({"threads": 100_000}, "threads=100000 must be at most 256"),
        ({"threads": "2"}, "threads='2' must be a whole number"),
        ({"providers": ["Warp"]}, "CPUExecutionProvider"),
        ({"providers": "Warp"}, r"providers=\['Warp'\]"),
        ({"providers": None}, "providers=None must be names of ONNX Runtime's"),
        ({"limits": 3}, "limits=3 must be Limits"),
    ],
)
def test_options_that_cannot_be_served_are_named(bundle, options, word):
    with pytest.raises(ConfigError, match=word):
        Predictor(bundle, **options)


def test_card_is_at_hand(predictor):
    assert predictor.card["algorithm"] == "hermes"
    assert predictor.shape == (6, 100)
    assert predictor.labels == tuple("abcdefg")


def test_swap_and_rollback(predictor, other, imu):
    first = predictor.digest
    before = predictor(imu.x).logits
    with pytest.raises(StateError, match="rollback"):
        predictor.rollback()
    predictor.swap(other)
    assert predictor(imu.x[0]).label.startswith("not ")
    assert predictor.digest == open_bundle(other).digest != first
    predictor.rollback()
    assert predictor.digest == first
    assert np.array_equal(predictor(imu.x).logits, before)
    predictor.rollback()
    assert predictor(imu.x[0]).label.startswith("not ")


def test_bad_bundle_is_not_swapped_in(predictor, bundle, tmp_path, imu):
    bad = tmp_path / "bad.talaria"
    bad.write_bytes(bundle.read_bytes()[:-1])
    first = predictor.digest
    with pytest.raises(BundleError):
        predictor.swap(bad)
    assert predictor.digest == first
    assert predictor(imu.x[0]).label
    with pytest.raises(StateError):
        predictor.rollback()


def test_bundle_for_other_inputs_is_not_swapped_in(predictor, imu, tmp_path):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(20, 7)).eval()
    path = tmp_path / "narrow.talaria"
    make_bundle(path, model, example=torch.zeros(2, 2, 10), variants=("fp32",), seconds=0)
    with pytest.raises(ConfigError, match="new Predictor"):
        predictor.swap(path)


def test_model_that_does_not_fit_its_labels_is_refused(bundle, tmp_path):
    opened = read_bundle(bundle.read_bytes())
    manifest = {k: v for k, v in opened.manifest.items() if k != "files"}
    manifest["output"] = {"name": "logits", "labels": ["one", "two"]}
    path = tmp_path / "odd.talaria"
    save(path, seal(manifest, {k: bytes(v) for k, v in opened.members.items()}))
    with pytest.raises(BundleError, match="labels"):
        Predictor(path)


def test_eight_threads_never_see_a_failed_or_mixed_prediction(bundle, other, imu):
    predictor = Predictor(bundle)
    x = imu.x[:4].numpy()
    expected = {}
    for path in (bundle, other):
        alone = Predictor(path)
        expected[alone.digest] = (alone(x).logits, alone.labels)
    failures: list[str] = []
    seen: dict[str, int] = dict.fromkeys(expected, 0)
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.0005):
            try:
                answer = predictor(x)
            except Exception as problem:  # noqa: BLE001
                failures.append(repr(problem))
                return
            logits, names = expected[answer.bundle]
            seen[answer.bundle] += 1
            if answer.names != names or not np.array_equal(answer.logits, logits):
                failures.append("mixed")
                return

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(200):
            predictor.swap((other, bundle)[turn % 2])
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert all(count > 0 for count in seen.values())
