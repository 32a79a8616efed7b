"""Small measurements of the machine. All run on the calling thread and read its CPU time, but for the disk."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn

from talaria import cpuinfo, seeds
from talaria.errors import ConfigError, StateError
from talaria.planning import cpu_timer, onnx_runtime

SIMD = ("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve")
"""Processor features that decide which kernels are fast, as Linux names them."""

BLOCKS = (4, 8, 16, 32)


def cpu_name() -> str:
    """The processor's name."""
    return cpuinfo.facts().get("model name") or platform.processor() or platform.machine()


def simd() -> tuple[str, ...]:
    """Those of :data:`SIMD` that this processor has; empty where the system does not tell."""
    return tuple(name for name in SIMD if name in cpuinfo.flags())


def memory_mb() -> float:
    """Main memory, as the system says it where /proc is closed too."""
    return float(round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6))


def block() -> int:
    """The number of channels that convolutions are fast in multiples of; 8 where ONNX Runtime is not installed.

    In its multiples ONNX Runtime keeps every convolution in its blocked form, which is read from the graph as its
    optimizer left it. Where three of these blocks take as long as four, the device computes in blocks twice as wide.
    """
    try:
        good = [b for b in BLOCKS if all(_blocked(b * n) for n in (3, 5))]
        least = max(8, good[0]) if good else 8
        while least < BLOCKS[-1] and _as_slow(3 * least, 4 * least):
            least *= 2
    except ConfigError:
        return 8
    return least


def _blocked(width: int) -> bool:
    blocked, every = onnx_runtime.convolutions(_net(width, 14))
    return blocked == every


def _as_slow(narrow: int, wide: int) -> bool:
    x = np.ones((1, 3, 14, 14), np.float32)
    took = cpu_timer.interleaved({str(w): onnx_runtime.caller(_net(w, 14), x) for w in (wide, narrow)}, 25)
    return cpu_timer.ratios(took, str(wide))[str(narrow)] > 0.93  # a native block gives 0.6 to 0.8


def train_rate() -> float:
    """Multiply-adds of the forward pass per CPU second of a training step, on a small convolutional network."""
    with _one_thread(), torch.inference_mode(False):
        with seeds.aside():
            net = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        x = torch.randn(8, 32, 16, 16, generator=torch.Generator().manual_seed(0))

        def step() -> None:
            net.zero_grad(set_to_none=True)
            net(x).square().mean().backward()

        products = 8 * 16 * 16 * 9 * (32 * 64 + 64 * 64)
        return products / _time(step)


def matrix_rate() -> float:
    """Multiply-adds per CPU second of a 256 x 256 matrix product in torch."""
    with _one_thread():
        a = torch.ones(256, 256)
        return 256**3 / _time(lambda: a @ a)


def bandwidth_mbs() -> float:
    """Memory copied, MB per CPU second, read plus written."""
    a = np.ones(8 << 20, np.float32)
    b = np.empty_like(a)
    return 2 * a.nbytes / 1e6 / _time(lambda: np.copyto(b, a), rounds=5)


def disk_mbs(folder: Path) -> float:
    """A file of 8 MB written with fsync to ``folder``, MB/s of wall time."""
    data = os.urandom(8 << 20)
    path = folder / f"probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        took = time.monotonic() - begin
    except OSError as error:
        raise StateError(
            f"cannot write to {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
        ) from None
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return len(data) / 1e6 / max(took, 1e-6)


def layers_ms() -> dict[str, float]:
    """CPU milliseconds of one layer of each kind in ONNX Runtime, 64 channels on a 28 x 28 map; empty without it."""
    kinds = {"pointwise": (1, 1), "depthwise": (3, 64), "convolution": (3, 1)}
    x = np.ones((1, 64, 28, 28), np.float32)
    try:
        layers = {kind: onnx_runtime.chain(64, [(64, kernel, groups)], 28) for kind, (kernel, groups) in kinds.items()}
        calls = {kind: onnx_runtime.caller(layer, x) for kind, layer in layers.items()}
        calls["linear"] = onnx_runtime.caller(onnx_runtime.product(512), np.ones((1, 512), np.float32))
    except ConfigError:
        return {}
    took = cpu_timer.interleaved(calls)
    return {name: round(1e3 * median(times), 5) for name, times in took.items()}


def _time(call: cpu_timer.Call, rounds: int = 9) -> float:
    return median(cpu_timer.interleaved({"": call}, rounds)[""])


class _one_thread:  # noqa: N801 - reads as a statement: with _one_thread()
    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


def _net(width: int, size: int) -> bytes:
    """A full, a depthwise and a 1x1 convolution of ``width`` channels, with ReLU between."""
    return onnx_runtime.chain(3, [(width, 3, 1), (width, 3, width), (width, 1, 1)], size)
