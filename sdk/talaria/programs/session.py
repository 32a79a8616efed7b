"""The one place where a program meets ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from talaria.errors import ConfigError, WireError
from talaria.planning.refusals import refusals, short
from talaria.tensors import Array, arrays

_ALIGNED = 16
"""Bytes."""


@lru_cache(maxsize=1)
def _one_arena() -> bool:
    """Whether all programs of this process take memory from one pool that grows by what is asked for. One pool each,
    which doubles, is 17 MB more on a device that trains imu_cnn, and no faster."""
    import onnxruntime as ort

    odd: tuple[type[Exception], ...] = (*refusals(), AttributeError, TypeError)
    try:
        place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(place, ort.OrtArenaCfg(0, 1, -1, -1))  # 1: as much as is asked for
    except odd:  # somebody has made one, or this version takes other words
        return False
    return True


def runtime() -> str:
    """Which ONNX Runtime this is: its version."""
    import onnxruntime as ort

    return str(ort.__version__)


def _given_back() -> Any:
    """Options of a run after which all free memory goes back: what the first one took, operator by operator, would lie
    beside the block of those that follow."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _aligned(value: Array) -> Array:
    """``value`` in memory that begins as numpy's own does; elsewhere, as in a slice or in bytes that came, ONNX Runtime
    adds up in another order, and the last bits are others."""
    return value if value.__array_interface__["data"][0] % _ALIGNED == 0 else value.copy()


class Session:
    """A program's file, loaded by stock ONNX Runtime to run on the calling thread alone. ``steady`` ones are run on the
    same few shapes again and again: each run takes its memory as one block, not once for each operator."""

    def __init__(self, data: bytes, *, steady: bool = False) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError(f"a program needs onnxruntime ({error}): pip install 'talaria[predict]'") from error
        self._refusals: tuple[type[Exception], ...] = (TypeError, *refusals())
        self._steady, self._met = steady, set[tuple[tuple[int, ...], ...]]()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_mem_pattern = steady  # the first run of some shapes is watched, the next ones take a block
        # to look for buffers that fit takes the square of the operators (3 s for 3200, else .2), and as batches have no
        # size in a graph, none do: memory and time of a step are the same
        options.enable_mem_reuse = False
        if _one_arena():
            options.add_session_config_entry("session.use_env_allocators", "1")
        try:
            self._session: Any = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except self._refusals as why:
            raise WireError(f"program: ONNX Runtime cannot load it ({short(why)}); build it again") from None

    def __call__(self, outputs: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        """The named outputs. Raises :class:`~talaria.errors.WireError` where ONNX Runtime refuses."""
        shapes = tuple(value.shape for value in feed.values()) if self._steady else ()
        first = [_given_back()] if self._steady and shapes not in self._met else []
        self._met.add(shapes)
        given = {name: _aligned(value) for name, value in arrays(feed).items()}
        found: list[Array] = self._run(partial(self._session.run, outputs, given), first)
        return found

    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """A call that reads ``inputs`` and writes ``outputs``, C-contiguous arrays in numpy's own memory that stay
        where they are: it spares the names, dictionaries and new arrays of each call."""
        binding = self._session.io_binding()
        for bind, every in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, array in every.items():
                bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        first = [_given_back()] if self._steady else []
        return partial(self._run, partial(self._session.run_with_iobinding, binding), first, inputs, outputs)

    def _run(self, run: Callable[[Any], Any], first: list[Any], *held: Mapping[str, Array]) -> Any:
        """What ``run`` gives, by options of its ``first`` time if any. ``held`` are arrays of which a binding knows the
        addresses alone."""
        options = first.pop() if first else None
        try:
            return run(options)
        except self._refusals as why:
            if options is not None:  # where ONNX Runtime has no arena, it refuses to give any of it back
                return self._run(run, first, *held)
            raise WireError(f"program: ONNX Runtime could not run it ({short(why)}); build it again") from None
