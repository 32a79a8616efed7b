"""A bound call gives the numbers of ``session.run``, on every thread and for every batch size."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest

from talaria.planning.io_binding import Bound
from talaria.planning.onnx_runtime import product


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(product(16), providers=["CPUExecutionProvider"])


def batch(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((size, 16)).astype(np.float32)


def test_the_numbers_are_those_of_run(session: onnxruntime.InferenceSession) -> None:
    call = Bound(session)
    for seed in range(8):  # the first call learns the shape, the others go through the buffers
        x = batch(1, seed)
        np.testing.assert_array_equal(call(x), session.run(None, {"x": x})[0])


def test_answers_are_the_callers_own(session: onnxruntime.InferenceSession) -> None:
    call = Bound(session)
    answers = [call(batch(1, seed)) for seed in range(4)]
    before = [a.copy() for a in answers]
    answers[-1][:] = 0
    call(batch(1, 9))
    for answer, was in list(zip(answers, before, strict=True))[:-1]:
        np.testing.assert_array_equal(answer, was)
    assert (answers[-1] == 0).all()


def test_inputs_need_not_be_contiguous(session: onnxruntime.InferenceSession) -> None:
    call = Bound(session)
    call(batch(1, 0))
    wide = np.repeat(batch(1, 1), 2, axis=1)
    np.testing.assert_array_equal(call(wide[:, ::2]), session.run(None, {"x": batch(1, 1)})[0])


def test_another_type_is_refused_before_and_after_binding(session: onnxruntime.InferenceSession) -> None:
    call = Bound(session)
    for _ in range(2):
        with pytest.raises(Exception, match="Unexpected input data type"):
            call(batch(1, 0).astype(np.float64))
        with pytest.raises(Exception, match="Invalid rank"):
            call(np.empty(0, np.float32))
        call(batch(1, 0))


def test_threads_do_not_share_buffers(session: onnxruntime.InferenceSession) -> None:
    call = Bound(session)

    def many(seed: int) -> bool:
        x = batch(1, seed)
        expected = session.run(None, {"x": x})[0]
        return all(np.array_equal(call(x), expected) for _ in range(300))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, range(16)))


def test_a_mixture_of_batch_sizes_and_a_refusal_in_between(maps: Bound) -> None:
    x = np.zeros((1, 2, 8, 8), np.float32)
    for size in (1, 1, 3, 1):
        assert maps(np.repeat(x, size, 0)).shape == (size, 2, 8, 8)
    with pytest.raises(Exception, match="Got invalid dimensions"):
        maps(np.zeros((1, 3, 8, 8), np.float32))
    assert maps(x).shape == (1, 2, 8, 8)
    assert maps(np.zeros((1, 2, 4, 4), np.float32)).shape == (1, 2, 4, 4)
    assert maps(x).shape == (1, 2, 8, 8)


@pytest.fixture
def maps() -> Bound:
    """A convolution that takes any batch and any size of maps."""
    import onnx

    helper = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones((2, 2, 3, 3), np.float32), "w")
    ends = [helper.make_tensor_value_info(name, 1, ["n", 2, None, None]) for name in ("x", "y")]
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    graph = helper.make_graph([node], "any", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return Bound(onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]))
