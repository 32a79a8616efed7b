"""The server half of HEART-PFL: symmetric divergence, attacks in pixel space, distillation that cannot harm."""

import math

import numpy as np
import pytest
import torch
from tolerance import roundings, slack
from torch import Tensor, nn

from talaria.aggregate.adversarial import Attack, Normalization, adversarial
from talaria.aggregate.distill import ROUNDS, Distilled, _loaded, divergence, taught
from talaria.aggregate.masked import MaskedMean
from talaria.algorithms.heart_pfl import HeartPFL
from talaria.errors import ConfigError, DataError, ModelError
from talaria.model.split import split_model
from talaria.model.state import load, state_of, to_torch
from talaria.tensors import Tensors, copied, equal
from talaria.types import Samples, Update

SCALE = Normalization((0.5,), (0.25,))


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.ReLU())
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x).mean((2, 3))))


def net(seed: int, norm: bool = False) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(norm)


def images(seed: int, count: int = 60) -> Samples:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    pixels = (0.3 * torch.rand(count, 1, 6, 6, generator=g) + 0.25 * y[:, None, None, None]).clamp(0, 1)
    return Samples.of(SCALE.inputs(pixels), y)


def both(samples: Samples) -> tuple[Tensor, Tensor]:
    """Inputs and labels as torch takes them."""
    return torch.from_numpy(samples.x), torch.from_numpy(samples.y)


def distilled(**options: object) -> Distilled:
    base = {"inner": MaskedMean(weighting="uniform"), "model": net(0), "proxy": images(1), "normalization": SCALE}
    quick = {"steps": 5, "batch": 16, "attack": Attack(steps=2), **options}
    return Distilled(**{**base, **quick})  # type: ignore[arg-type]


def test_divergence_is_symmetric_shift_invariant_and_zero_for_equals() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, 5, generator=g), torch.randn(7, 5, generator=g)
    assert divergence(a, b) > 0
    assert divergence(a, b).item() == pytest.approx(divergence(b, a).item())
    assert divergence(a, a).item() == 0.0
    assert divergence(a + 3.0, b - 1.0).item() == pytest.approx(divergence(a, b).item(), rel=1e-5)
    p, q = torch.softmax(a, 1), torch.softmax(b, 1)
    assert divergence(a, b).item() == pytest.approx(((p - q) * (a - b)).sum(1).mean().item(), rel=1e-5)


def test_divergence_of_the_hand_vector_has_finite_gradients() -> None:
    """With probability and log-probability exchanged, as released, the loss and all gradients are NaN."""
    a, b = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 1.0]])
    loss = divergence(a, b)
    assert roundings(loss, 2 * math.tanh(0.5)) <= 32
    assert loss.item() == pytest.approx(0.9242343, rel=5e-6)
    loss.backward()
    assert a.grad is not None
    assert bool(torch.isfinite(a.grad).all())
    extreme = divergence(torch.tensor([[200.0, -200.0]]), torch.tensor([[-200.0, 200.0]]))
    assert bool(torch.isfinite(extreme))


def test_the_attack_stays_within_its_bounds_in_pixel_space() -> None:
    """Clamping normalized inputs to [0, 1] would move pixels sixty times too far."""
    (x, y), model = both(images(2)), net(1, norm=True).eval()
    before = state_of(model)
    moved = adversarial(model, x, y, Attack(), SCALE, torch.Generator().manual_seed(0))
    pixels, clean = SCALE.pixels(moved), SCALE.pixels(x)
    assert float((pixels - clean).abs().max()) <= 8 / 255 + slack(clean, 32)
    assert float(pixels.min()) >= -slack(clean, 32)
    assert float(pixels.max()) <= 1 + 1e-6
    assert float((moved - x).abs().max()) > 2 / 255
    assert equal(state_of(model), before)
    assert not any(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_the_attack_raises_the_loss_of_a_linear_model() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).eval()
    x, y = both(images(3))
    for steps in (1, 20):
        attack = Attack(steps=steps, random_start=False)
        moved = adversarial(model, x, y, attack, SCALE, torch.Generator().manual_seed(0))
        clean, worse = (nn.functional.cross_entropy(model(z), y, reduction="none") for z in (x, moved))
        assert bool((worse >= clean - 1e-6).all())


def test_one_step_on_a_linear_model_gains_eps_times_the_gradients_l1_norm() -> None:
    model = nn.Linear(3, 2, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]]))
    x, y, eps = torch.full((1, 3), 0.5), torch.tensor([0]), 1e-4
    attack = Attack(eps=eps, step=eps, steps=1, random_start=False)
    moved = adversarial(model, x, y, attack, Normalization(), torch.Generator())
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(point), y), [point])
    gain = nn.functional.cross_entropy(model(moved), y) - nn.functional.cross_entropy(model(x), y)
    assert gain.item() == pytest.approx(eps * slope.abs().sum().item(), rel=0.02)


def test_a_fast_gradient_step_takes_the_margin_of_the_hand_vector() -> None:
    model = nn.Linear(3, 2, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]]))
    x = torch.full((1, 3), 0.5)
    attack = Attack(step=8 / 255, steps=1, random_start=False)
    moved = adversarial(model, x, torch.tensor([0]), attack, Normalization(), torch.Generator())
    margin = (model(x)[0, 0] - model(moved)[0, 0]).item()
    assert margin == pytest.approx(0.1098039, abs=1e-6)


def test_teachers_and_inputs_stay_untouched_and_logits_are_averaged() -> None:
    rule, model = distilled(), net(0, norm=True).eval()
    teachers = [state_of(net(k)) for k in (1, 2)]
    before = [copied(t) for t in teachers]
    mean = state_of(net(3))
    kept = copied(mean)
    rule.distil(mean, teachers)
    assert all(equal(a, b) for a, b in zip(teachers, before, strict=True))
    assert equal(mean, kept)
    x, _ = both(images(5))
    with torch.no_grad():
        want = torch.stack([net(k).eval()(x) for k in (1, 2)]).mean(0)
    assert roundings(taught(net(0).eval(), [to_torch(t) for t in teachers], x), want) <= 64
    normed = state_of(net(4, norm=True))
    again = copied(normed)
    taught(model, [to_torch(normed)], x)
    assert equal(normed, again)


def test_a_single_teacher_equal_to_the_student_teaches_nothing() -> None:
    model = net(0).eval()
    x, _ = both(images(1))
    loss = divergence(model(x), taught(model, [to_torch(state_of(model))], x))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and float(p.grad.abs().max()) < 1e-7 for p in model.parameters())


def test_the_mean_itself_comes_back_where_no_step_is_better() -> None:
    mean = state_of(net(0))
    bad = {k: -5 * v for k, v in mean.items()}
    x, _ = both(images(7))
    perfect = Samples.of(x, net(0).eval()(x).argmax(1))
    rule = distilled(selection=perfect)
    assert rule.distil(mean, [bad]) is mean


def test_a_step_that_diverged_is_never_the_better_one() -> None:
    """The largest of outputs that are no numbers is the first one, which would be right for the first class."""
    mean = state_of(net(0))
    x, _ = both(images(7))
    worst = Samples.of(x, net(0).eval()(x).argmin(1))
    first = worst.take(np.flatnonzero(worst.y == 0))
    assert len(first)
    rule = distilled(selection=first, lr=1e30, every=5)
    assert rule.distil(mean, [state_of(net(1))]) is mean


def test_distillation_from_better_teachers_helps_and_is_kept() -> None:
    data = images(1, 240)
    x, y = both(data)
    teacher = net(5)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(teacher.eval()(x), y).backward()
        optimizer.step()
    judge = images(9, 120)
    rule = distilled(proxy=data, selection=judge, steps=150, batch=64, lr=0.03, attack=Attack(steps=0), every=10)

    def right(state: Tensors) -> float:
        model, (x, y) = load(net(0), state).eval(), both(judge)
        return float((model(x).argmax(1) == y).float().mean())

    mean = state_of(net(0))
    assert right(rule.distil(mean, [state_of(teacher)])) > right(mean) + 0.1


def test_rounds_are_counted_and_distillation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, shared = distilled(rounds=2), state_of(net(0))
    state, calls = rule.init(shared), []
    monkeypatch.setattr(Distilled, "distil", lambda self, mean, teachers, round: calls.append(round) or mean)
    for _ in range(4):
        shared, state = rule.apply(shared, state, [Update(state_of(net(1)), 1.0)])
    assert calls == [0, 1]
    assert int(state[ROUNDS]) == 4


def test_after_the_last_round_it_is_the_uniform_mean() -> None:
    rule, shared = distilled(rounds=1), state_of(net(0))
    state = {**rule.init(shared), ROUNDS: np.array(1)}
    sent = [Update(state_of(net(k)), float(k), f"c{k}") for k in (1, 2, 3)]
    plain, _ = MaskedMean(weighting="uniform").apply(shared, {}, sent)
    assert equal(rule.apply(shared, state, sent)[0], plain)


def test_the_same_seed_gives_the_same_bits() -> None:
    teachers = [state_of(net(k)) for k in (1, 2)]
    one, two = (distilled(every=1).distil(state_of(net(0)), teachers) for _ in range(2))
    assert equal(one, two)


def test_only_shared_tensors_move_and_norm_statistics_that_stay_home_are_estimated() -> None:
    model = net(0, norm=True)
    algorithm = HeartPFL()
    split = split_model(model, "head")
    shared, _ = algorithm.init(model, split)
    assert "body.1.running_mean" not in shared
    rule = Distilled(
        inner=algorithm.aggregator, model=model, proxy=images(1), normalization=SCALE, steps=3, batch=16,
        attack=Attack(steps=1),
    )  # fmt: skip
    sent = [Update({k: np.asarray(v + 0.1 * i) for k, v in shared.items()}, 1.0, f"c{i}") for i in range(2)]
    before = state_of(model)
    new, _ = rule.apply(shared, rule.init(shared), sent)
    assert set(new) == set(shared)
    assert equal(state_of(model), before)


def test_statistics_that_stay_home_are_those_of_all_the_proxys_inputs() -> None:
    """Of 514 inputs, sorted by label, the last two counted as much as all others."""
    model, given = net(0, norm=True), images(1, 514)
    proxy = given.take(np.argsort(given.y, kind="stable"))
    shared, _ = HeartPFL().init(model, split_model(model, "head"))
    _loaded(model, shared, torch.from_numpy(proxy.x))
    with torch.no_grad():
        out = model.body[0](torch.from_numpy(proxy.x)).transpose(0, 1).flatten(1)
    np.testing.assert_allclose(model.body[1].running_mean, out.mean(1), rtol=0.05, atol=0.02)
    np.testing.assert_allclose(model.body[1].running_var, out.var(1), rtol=0.05)


def test_a_proxy_of_other_classes_is_refused_unless_the_teachers_label_it() -> None:
    other = Samples(images(1).x, images(1).y + 1)
    with pytest.raises(DataError, match=r"classes 0\.\.2"):
        distilled(proxy=other, selection=images(2))
    assert distilled(proxy=other, selection=images(2), labels="teachers").distil(state_of(net(0)), [state_of(net(1))])


def test_what_is_distilled_on_cannot_judge() -> None:
    with pytest.raises(DataError, match="both proxy and selection"):
        distilled(selection=images(1).take(np.arange(3)))


def test_a_model_that_is_not_the_runs_is_refused() -> None:
    with pytest.raises(ModelError, match="other"):
        distilled().distil({"other": np.zeros(1, np.float32)}, [state_of(net(0))])


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"rounds": 0}, {"batch": 0}, {"every": 0}, {"lr": 0.0}, {"labels": "none"}]
)
def test_bad_options_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        distilled(**options)


def test_bad_scales_and_attacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="std"):
        Normalization((0.5,), (0.0,))
    with pytest.raises(ConfigError, match="eps"):
        Attack(eps=0.0)


def test_too_little_proxy_data_is_refused() -> None:
    with pytest.raises(DataError, match="at least one"):
        distilled(proxy=images(1, 1))
