"""An app's log and its stderr are its own while a bundle is made: the converting libraries alone are not heard."""

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable

from talaria.model.prunability import survey
from talaria_export import export_onnx
from talaria_export.convert.onnx import convert
from talaria_export.convert.quantize import linear_int8, static_int8
from talaria_export.convert.quiet import quiet


def said_beside(work: Callable[[], object], say: Callable[[str], object]) -> list[str]:
    """What another thread said while ``work`` ran."""
    said, over = [], threading.Event()

    def talk() -> None:
        while not over.is_set():
            said.append(f"sample {len(said)}")
            say(said[-1])
            time.sleep(0.002)

    other = threading.Thread(target=talk)
    other.start()
    try:
        work()
    finally:
        over.set()
        other.join()
    return said


def test_quantizing_sets_up_no_log_in_the_apps_place(imu, monkeypatch):
    proto = convert(imu.model, imu.x)
    monkeypatch.setattr(logging.root, "handlers", [])
    static_int8(proto, imu.x.numpy(), keep=[], reduce_range=True)
    linear_int8(proto)
    assert logging.root.handlers == []
    assert logging.root.filters == []


def test_an_app_is_heard_while_its_device_quantizes(imu, caplog):
    proto = convert(imu.model, imu.x)
    caplog.clear()
    said = said_beside(lambda: static_int8(proto, imu.x.numpy(), keep=[], reduce_range=True), logging.warning)
    assert [record.getMessage() for record in caplog.records] == said


def test_an_app_is_heard_on_stderr_while_its_device_exports(imu, capsys):
    said = said_beside(lambda: export_onnx(imu.model, imu.x), lambda text: sys.stderr.write(f"{text}\n"))
    assert capsys.readouterr().err.splitlines() == said


def test_an_apps_warnings_come_again_where_one_thread_exports_and_another_one_plans(imu):
    before = list(warnings.filters)
    exporting = threading.Thread(target=export_onnx, args=(imu.model, imu.x))
    exporting.start()
    while exporting.is_alive() and warnings.filters == before:
        time.sleep(0.001)
    survey(imu.model, imu.x)
    exporting.join()
    assert warnings.filters == before


def test_threads_that_are_quiet_at_once_leave_no_more_behind_each_time(monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    for _ in range(2 * sys.getrecursionlimit()):
        first, second = quiet(), quiet()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    sys.stderr.write("")
