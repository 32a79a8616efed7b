"""Orders of whoever may write the state folder, as files: a coordinator that runs takes them at its next tick.

``orders/NAME.json`` is an order, and ``orders/NAME.answer`` what became of it. Both are small, written whole, and
gone once they are read.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, get_args

from talaria import durable
from talaria.errors import ConfigError, StateError, so_that_it_can_be_written
from talaria.foreign import parsed
from talaria_coordinator.fleet.operator_commands import Order, Verb

LARGEST = 1 << 20
WAIT_S = 60.0


def put(state: Path, order: Order, ended: Callable[[], bool], wait_s: float = WAIT_S) -> str | None:
    """Give an order to the coordinator that runs on this state folder; the fleet's status after it. None where that has
    ``ended`` meanwhile, as it says once, and left the order alone: it is taken back.

    Raises :class:`~talaria.errors.ConfigError` where it is refused, and :class:`~talaria.errors.StateError` where
    nobody answers within ``wait_s`` seconds, the coordinator ended over it, or the folder refuses."""
    folder, name = state / "orders", secrets.token_hex(8)
    asked, answered = folder / f"{name}.json", folder / f"{name}.answer"
    facts: dict[str, Any] = {"verb": order.verb, "device": order.device, "reason": order.reason, "rounds": order.rounds}
    facts |= {"run": order.run, "classes": order.classes, "canary": order.canary}
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        durable.write(asked, json.dumps(facts).encode())
        try:
            end = time.monotonic() + wait_s
            while not answered.exists():
                if ended() and not answered.exists():
                    if asked.exists():
                        return None
                    raise StateError(
                        "fleet: the coordinator ended while it carried the order out; `talaria coordinator status` and "
                        "`report` say whether it did"
                    )
                if time.monotonic() >= end:
                    if not asked.exists():  # given again, it might be carried out twice
                        raise StateError(
                            f"fleet: the coordinator took the order and did not answer within {wait_s:g} s; it may yet "
                            "carry it out: look at its log and at `talaria coordinator status` before you try again"
                        )
                    raise StateError(
                        f"fleet: the coordinator did not take the order within {wait_s:g} s; look at its log, and try "
                        "again"
                    )
                time.sleep(0.05)
            answer = json.loads(answered.read_bytes())
        finally:  # also of who gives up by Ctrl-C: an order that is left is carried out some day
            asked.unlink(missing_ok=True)
            answered.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"fleet: cannot use {folder}: {error.strerror}; {so_that_it_can_be_written(error)}") from None
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    return str(answer["status"])


def take(state: Path) -> Iterator[Order]:
    """The orders that lie in the folder, each taken out of it; its answer is written once it is known."""
    folder = state / "orders"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        order = Order("pause")
        try:
            data = durable.read(path, LARGEST + 1)
            if len(data) > LARGEST:
                raise ConfigError(f"order: {path.name} is above {LARGEST} bytes; give orders by `talaria coordinator`")
            order = _read(data)
        except (ConfigError, OSError) as error:
            order.answer.set_exception(error)
        with contextlib.suppress(OSError):
            path.unlink()
            order.answer.add_done_callback(partial(_write, path.with_suffix(".answer")))
            if not order.answer.done():
                yield order


def _read(data: bytes) -> Order:
    try:
        facts: Any = parsed(data)
        device, reason = str(facts["device"]), str(facts["reason"])[:200]
        rounds, run, classes, canary = facts["rounds"], str(facts["run"]), facts["classes"], str(facts["canary"])
        if facts["verb"] not in get_args(Verb) or type(rounds) is not int or type(classes) is not int:
            raise ValueError("no such order")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"order: not one ({str(error)[:100]}); give orders by `talaria coordinator`") from None
    return Order(facts["verb"], device, reason, rounds, run, classes, canary)


def _write(path: Path, done: Future[str]) -> None:
    error = done.exception()
    facts = {"status": done.result()} if error is None else {"error": str(error)}
    with contextlib.suppress(OSError):
        durable.write(path, json.dumps(facts).encode())
