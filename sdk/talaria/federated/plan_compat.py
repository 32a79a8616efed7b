"""A device's plan meets a fleet's run: what of the plan takes effect, and what the run cannot give it.

Widths, batch, slices, steps and codec are this device's own. The model and what travels are the run's: a plan that was
made for others is refused, because its figures would not hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from talaria.config import LIMIT
from talaria.errors import ConfigError, some_of
from talaria.model.masks import ChannelLayout
from talaria.model.spec import ModelSpec
from talaria.model.split import WHOLE, Part, Split
from talaria.planning.plan import Plan
from talaria.types import Recipe
from talaria.wire.codec import TensorSpec
from talaria.wire.tensor_codecs import Codec

_BYTES = {"raw": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0}


def read(path: Path) -> Plan:
    """The plan in a file that ``talaria plan --json`` wrote. Raises :class:`ConfigError` on anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise ConfigError(f"plan: {path} has more than {LIMIT} bytes, so it is no plan")
        return Plan.from_json(json.loads(data))
    except OSError as error:
        raise ConfigError(
            f"plan: {path} cannot be read ({error.strerror}); write it with `talaria plan --json`"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"plan: {path} is not JSON ({error}); write it with `talaria plan --json`") from None


def recipe_under(recipe: Recipe, plan: Plan | None) -> Recipe:
    """How this device trains: the run's recipe with the plan's batch and slices, and at most the plan's steps in each
    training of a round (an algorithm that trains twice a round takes up to twice as many)."""
    if plan is None:
        return recipe
    most = [n for n in (recipe.most_steps, plan.steps) if n is not None]
    return recipe.but(
        batch=recipe.batch if plan.batch is None else plan.batch,
        accumulate=max(recipe.accumulate, plan.accumulate),
        most_steps=min(most) if most else None,
    )


def codec_under(codec: str, plan: Plan | None) -> str:
    """How this device's updates travel: the smaller of the run's codec and the plan's.

    Raises :class:`~talaria.errors.ConfigError` where the run sends whole values and the plan a lossy codec: rounding
    is for differences, and all devices of a round must send the same kind.
    """
    if plan is None or _bytes(plan.codec) >= _bytes(codec):
        return codec
    if codec == "raw":
        raise ConfigError(
            f"plan: codec={plan.codec!r}, but the run's is 'raw', with which all devices send whole values; set "
            f'codec = "{plan.codec}" under [run] of the coordinator\'s fleet.toml, or plan with a larger upload_mb'
        )
    return plan.codec


def require_groups(layout: ChannelLayout, plan: Plan) -> None:
    """Raise :class:`~talaria.errors.ConfigError` where the plan's widths name channels that the model does not have."""
    odd = sorted(set(plan.widths) - set(layout.sizes))
    if odd:
        raise ConfigError(
            f"plan: widths name {some_of(odd, 4)}, but the run's model has {some_of(sorted(layout.sizes), 8)}; plan "
            "anew with `talaria plan` for this model"
        )


def require_model(spec: ModelSpec, plan: Plan) -> None:
    """Raise :class:`~talaria.errors.ConfigError`, naming each difference, where ``plan`` is for another model than
    ``spec``. Initial weights (seed, pretrained) may differ."""
    if plan.model is not None:
        meant = ModelSpec.from_json(plan.model)
        names = ("name", "input_shape", "classes", "adapters", "options")
        odd = [(n, getattr(meant, n), getattr(spec, n)) for n in names if getattr(meant, n) != getattr(spec, n)]
    elif plan.adapter is not None:
        own = None if spec.adapters is None else (spec.adapters.kind, spec.adapters.rank)
        odd = [] if own == (plan.adapter, plan.rank) else [("adapters", (plan.adapter, plan.rank), own)]
    else:
        odd = []
    if odd:
        said = "; ".join(f"{name} is {there}, the run's is {here}" for name, there, here in odd)
        raise ConfigError(f"plan: its {said}; plan again with `talaria plan` for this run's model")


def require_trained(shared: Mapping[str, TensorSpec], split: Split, plan: Plan) -> None:
    """Raise :class:`~talaria.errors.ConfigError` where matrices of a part that ``plan`` freezes are among ``shared``,
    which trains and travels (vectors, such as BatchNorm's, may)."""
    part_of: Mapping[str, Part] = {k: part for part in WHOLE for k in split.of(part)}
    odd = sorted(k for k, v in shared.items() if len(v.shape) > 1 and part_of.get(k, "body") not in plan.trained)
    if odd:
        raise ConfigError(
            f"plan: only {' and '.join(plan.trained)} may train and travel, but the run's algorithm sends {odd[0]!r} "
            f"and {len(odd) - 1} more; choose an algorithm that keeps them frozen (`talaria algorithms`), or allow "
            "more training in the budget and plan again"
        )


def _bytes(codec: str) -> float:
    """Bytes that a value takes, about."""
    how = Codec.parse(codec)
    return 6 * how.fraction if how.name == "topk" else _BYTES[how.name]
