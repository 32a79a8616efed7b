"""What came of it: one plain dict, with every figure measured in this run."""

import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from smartwatch.baselines import Baselines
from talaria.data import Client, Federated
from talaria.federated import run_model
from talaria.federated.run import Run
from talaria.model import masks
from talaria.simulation.reporting import mask_overlap
from talaria.tensors import Array
from talaria.training.evaluation import summarize
from talaria.training.loop import predict
from talaria_edge.storage import tensor_files
from talaria_export.build.inputs import load_state
from talaria_export.bundle.bundle import open_bundle
from talaria_export.runtime.session import session_of

METHODS = ("local", "fedavg", "fedavg_ft", "personal")
RATIOS = ("params_ratio", "bundle_ratio", "latency_ratio", "upload_ratio", "download_ratio")


def summary_of(
    run: Run, data: Federated, hardware: Mapping[str, str], fleet: Mapping[str, Any], dense: Baselines, seconds: float
) -> dict[str, Any]:
    """The summary that ``summary.json`` holds and the report tells."""
    users = {
        name: _user(name, run, hardware[name], fleet["devices"][name], dense, client, newcomer=name in data.newcomers)
        for name, client in data.everyone.items()
    }
    members = [users[name] for name in data.clients]
    arrived = [users[name] for name in data.newcomers]
    story = ("zero_shot", "scratch", "fedavg_ft", "personal")
    return {
        "title": "Twenty smartwatch wearers",
        "subtitle": f"{len(members)} learned together over MQTT; {len(arrived)} put on the watch afterwards",
        "users": users,
        "accuracy": _means(members, METHODS),
        "worst_tenth": {m: summarize([u["accuracy"][m] for u in members]).worst_tenth for m in METHODS},
        **{ratio: _mean(members, ratio) for ratio in RATIOS},
        "onnx_max_abs_diff": max(u["onnx_max_abs_diff"] for u in users.values()),
        "newcomers": {
            "accuracy": _means(arrived, story),
            "worst": {m: min(u["accuracy"][m] for u in arrived) for m in story},
        },
        "hardware": {
            name: {r: _mean([u for u in users.values() if u["device"] == name], r) for r in RATIOS}
            for name in dict.fromkeys(hardware.values())
        },
        "rounds": run.rounds,
        "seed": run.seed,
        "algorithm": run.algorithm,
        "broker": fleet["broker"],
        "agents_peak_mb": round(fleet["peak_mb"]),
        "curve": _curve(fleet["metrics"]),
        "overlap": mask_overlap(_masks(run, data, hardware, fleet["devices"])),
        "seconds": round(seconds, 1),
        "versions": _versions(),
        "notes": [
            "Accuracy is on each wearer's own test windows, recorded after the training windows and never looked at "
            "before the end. Members learn from all their labelled windows, newcomers from one minute of them.",
            "Upload counts every byte that a member's agent published during the rounds, against the dense model as it "
            "is in each of them; download every byte that it received until it had its last model, against the dense "
            "model before each round and after the last. Latency is thread CPU time in ONNX Runtime "
            "against the dense model, interleaved in the same run. The curve is validation accuracy before each "
            "round's training.",
        ],
    }


def _user(
    name: str, run: Run, device: str, result: Mapping[str, Any], dense: Baselines, data: Client, *, newcomer: bool
) -> dict[str, Any]:
    report, others = result["report"], dense.accuracy[name]
    accuracy = {**others, "personal": result["test"]["accuracy"]}
    if newcomer:
        accuracy |= {"zero_shot": others["fedavg"], "scratch": others["local"]}
    parameters = sum(p.numel() for p in run_model.template(run.spec).parameters())
    user: dict[str, Any] = {
        "role": "newcomer" if newcomer else "member",
        "device": device,
        "accuracy": accuracy,
        "parameters": result["parameters"],
        "params_ratio": result["parameters"] / parameters,
        "bundle_bytes": report["bytes"],
        "bundle_ratio": report["model_bytes"] / report["dense_bytes"],
        "variant": report["default"],
        "latency_ms": report["latency_ms"],
        "latency_ratio": report["latency_ratio"],
        "onnx_max_abs_diff": _from_torch(result, data.test.x),
    }
    if not newcomer:
        user["upload_bytes"] = sum(step["up"] for step in result["traffic"].values())
        user["upload_ratio"] = user["upload_bytes"] / dense.bytes_up
        user["download_bytes"] = sum(step["down"] for step in result["traffic"].values())
        user["download_ratio"] = user["download_bytes"] / dense.bytes_down
    return user


def _from_torch(result: Mapping[str, Any], x: Array) -> float:
    """The largest difference between a wearer's bundle and torch, which the wearer does not have, with its weights."""
    model, *_ = load_state(Path(result["personal"]).parent)
    return float(abs(session_of(open_bundle(result["bundle"]), "fp32")(x) - predict(model, x)).max())


def _means(users: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, float]:
    return {m: statistics.fmean(u["accuracy"][m] for u in users) for m in methods}


def _mean(users: Sequence[Mapping[str, Any]], ratio: str) -> float | None:
    values = [u[ratio] for u in users if u.get(ratio) is not None]
    return statistics.fmean(values) if values else None


def _curve(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rounds: dict[int, list[float]] = {}
    for event in events:
        if "val_accuracy" in event["metrics"]:
            rounds.setdefault(event["round"], []).append(event["metrics"]["val_accuracy"])
    return [{"round": r, "accuracy": {"personal": statistics.fmean(v)}} for r, v in sorted(rounds.items())]


def _masks(
    run: Run, data: Federated, hardware: Mapping[str, str], devices: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One member's mask for each class of hardware."""
    found = {}
    for name in data.clients:
        path = Path(devices[name]["private"])
        tensors, _ = tensor_files.unpack(tensor_files.read(path, "run the demo again"), path, "run the demo again")
        if hardware[name] not in found and any(key.startswith(masks.PREFIX) for key in tensors):
            found[hardware[name]] = masks.from_tensors(run_model.layout_of(run.spec), tensors)
    return found


def _versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for package in ("talaria", "torch", "onnx", "onnxruntime", "torch-pruning", "numpy", "paho-mqtt", "amqtt"):
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            continue
    return out
