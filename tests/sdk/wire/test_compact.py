"""A device with a mask downloads the channels that it keeps, and learns what it would from the whole model."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.algorithms import ALGORITHMS
from talaria.errors import ModelError, WireError
from talaria.federated import device_task, global_model, rounds, run_model
from talaria.federated.run import Member, Run
from talaria.model import masks
from talaria.model.masks import ChannelMask
from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan
from talaria.tensors import equal
from talaria.types import Recipe, Samples
from talaria.wire import codec, compact, download, strict_safetensors

RUN = Run(spec=ModelSpec("imu_cnn", (3, 16), 3), algorithm="fedavg", recipe=Recipe(epochs=1, batch=4), rounds=3)
LAYOUT = run_model.layout_of(RUN.spec)
SHARED = rounds.start(replace(RUN, buffers="aggregate"))[0]
SCHEMA = codec.schema_of(SHARED)
MASKS = st.fixed_dictionaries(
    {
        group: st.sets(st.integers(0, size - 1), min_size=1).map(lambda kept: tuple(sorted(kept)))
        for group, size in LAYOUT.sizes.items()
    }
).map(lambda kept: ChannelMask(LAYOUT, kept))
HALF = ChannelMask(LAYOUT, {group: tuple(range(0, size, 2)) for group, size in LAYOUT.sizes.items()})


@given(mask=MASKS, how=st.sampled_from(download.CODECS))
def test_what_is_downloaded_is_what_is_kept_to_the_bit(mask, how):
    model = {**download.rounded(SHARED, how), "mask/conv1": np.arange(4, dtype=np.uint8)}
    data = download.encoded(model, how)
    small = compact.compacted(data, mask)
    found = compact.opened(small, SCHEMA, LAYOUT, ("mask/",))
    assert found is not None
    assert equal(found.tensors, masks.gather(model, mask))
    assert (found.of, found.mask) == (hashlib.sha256(data).digest(), mask)
    assert compact.model_of(small) == compact.model_of(data) == found.of
    assert masks.unpack(LAYOUT, masks.pack(mask)) == mask


def test_half_of_the_channels_are_far_fewer_bytes():
    data = global_model.encode_model(SHARED)
    assert len(compact.compacted(data, HALF)) < 0.45 * len(data)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_algorithm_learns_from_what_it_keeps_what_it_learns_from_the_whole(algorithm):
    run = Run(spec=RUN.spec, algorithm=algorithm, recipe=RUN.recipe, rounds=3)
    draw = np.random.default_rng(1)
    x = draw.standard_normal((12, 3, 16)) + np.arange(12)[:, None, None] % 3
    plan = Plan(widths={group: size // 2 for group, size in LAYOUT.sizes.items()})
    member = Member("anna", Samples.of(x[:9], np.arange(9) % 3), Samples.of(x[9:], np.arange(3)), plan)
    shared, server = rounds.start(run)
    private = None
    for round in (1, 2):
        data = global_model.encode_model(shared)
        mask = device_task.mask_of(run, member, private)
        assert mask is not None
        held, kept = global_model.decode_held(run, global_model.encode_compact(run, data, masks.pack(mask)))
        assert kept == mask
        update, own = rounds.participate(run, member, shared, private, round)
        again, own_again = rounds.participate(run, member, held, private, round)
        assert codec.encode_update(again) == codec.encode_update(update)
        assert equal(own_again, own)
        private = own
        shared, server = rounds.close(run, shared, server, [update])


def rewritten(data, **facts):
    entries, meta = strict_safetensors.unpack(data, most=1000)
    about = {**json.loads(meta["talaria-compact"]), **facts}
    planes = {name: entry.array() for name, entry in entries.items() if name not in facts.get("without", ())}
    about.pop("without", None)
    return strict_safetensors.pack(planes, {"talaria-compact": json.dumps(about)})


SMALL = compact.compacted(global_model.encode_model(SHARED), HALF)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (rewritten(SMALL, v=2), "not those of version 1"),
        (rewritten(SMALL, of="x" * 64), "of='x+.*' must be 64 hex digits"),
        (rewritten(SMALL, mask="0" * 64), "do not match its digest"),
        (rewritten(SMALL, without=["conv1.weight"]), "'conv1.weight' is missing"),
        (rewritten(SMALL, without=["mask|conv1"]), "groups"),
        (SMALL[:-1], "truncated|bytes"),
    ],
)
def test_what_is_no_part_of_the_model_is_refused(bad, why):
    with pytest.raises(WireError, match=why):
        compact.opened(bad, SCHEMA, LAYOUT)


def test_a_part_that_is_damaged_on_flash_is_of_no_model():
    assert compact.model_of(SMALL[:-1] + bytes([SMALL[-1] ^ 1])) == b""
    assert global_model.decode_held(replace(RUN, buffers="aggregate"), global_model.encode_model(SHARED))[1] is None


@pytest.mark.parametrize("data", [b"", b"\x00" * len(masks.pack(HALF)), masks.pack(HALF) + b"\x00", b"\xff" * 3])
def test_bytes_that_are_no_mask_are_refused(data):
    with pytest.raises(ModelError, match="mask"):
        masks.unpack(LAYOUT, data)
