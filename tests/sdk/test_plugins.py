"""What others wrote, by name: a package of one's own (``tests/mypkg``) in every place that takes a name."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mypkg
import numpy as np
import pytest
import torch
from mypkg.mine import FedHalf, First

import talaria as sdk
from talaria import algorithms, plugins
from talaria.aggregate import registry
from talaria.algorithms.fedprox import FedProx
from talaria.algorithms.ffgg import FFGG
from talaria.algorithms.sharing import update
from talaria.errors import ConfigError
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.options import taken_apart
from talaria.simulation.run import simulate
from talaria.tensors import Tensors, equal, only
from talaria.training.engine import served, train
from talaria.training.interface import Task
from talaria.types import Recipe, Samples, Update
from talaria.valid import options_of

SPEC = ModelSpec("mlp", (4,), 3)
TALARIA = Path(sys.executable).parent / "talaria"


def members(names: tuple[str, ...] = ("anna", "bela", "carl")) -> dict[str, Member]:
    made = {}
    for seed, name in enumerate(names):
        y = torch.arange(30) % 3
        x = 0.4 * torch.randn(30, 4, generator=torch.Generator().manual_seed(seed))
        x[:, 0] += 2 * y
        made[name] = Member(name, Samples.of(x[:24], y[:24]), Samples.of(x[24:], y[24:]))
    return made


def run_of(algorithm: str, **hparams: Any) -> Run:
    return Run(spec=SPEC, algorithm=algorithm, hparams=hparams, rounds=2, recipe=Recipe(batch=8, lr=0.05))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of one's own: the package, three clients' arrays, and nothing installed."""
    shutil.copytree(Path(mypkg.__file__).parent, tmp_path / "mypkg", ignore=shutil.ignore_patterns("__pycache__"))
    draw = np.random.default_rng(0)
    y = np.tile(np.arange(3), 40)
    x = draw.normal(0, 0.4, (120, 4)).astype(np.float32)
    x[:, 0] += 2 * y
    np.savez(tmp_path / "data.npz", x=x, y=y, client=np.repeat(["anna", "bela", "carl"], 40))
    return tmp_path


def talaria(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command as it is installed, started in ``folder``."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    env |= {} if path is None else {"PYTHONPATH": str(path)}
    return subprocess.run(
        [TALARIA, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def installed(folder: Path, value: str = "mypkg.mine:FedHalf", name: str = "mypkg") -> Path:
    """``folder`` as a place where a distribution with entry points is installed."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[talaria.algorithms]\nfedhalf = {value}\n[talaria.aggregators]\nfirst = mypkg.mine:First\n"
    )
    return folder


# -- algorithms


@dataclass(frozen=True, kw_only=True)
class Slip(FedHalf):
    """Gives ``init``, ``fit`` or ``personal`` in another form."""

    what: str = "pair"

    def init(self, model: Any, split: Any) -> Any:
        shared, private = super().init(model, split)
        return shared if self.what == "shared" else (shared, private)

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> Any:
        update, after = super().fit(task, shared, private)
        if self.what == "metrics":
            return update.but(metrics={1: 2.0}), after
        if self.what == "numpy":
            return update.but(metrics={"loss": np.float32(0.1), "seen": torch.tensor(3)}), after
        if self.what == "weight":
            return update.but(weight="3"), after
        own: Any = {"seen": [1, 2], "words": np.array(["a"]), "module": torch.zeros(2)}.get(self.what)
        return update if self.what == "pair" else (update, after if own is None else {**after, self.what: own})

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Any:
        return {**shared, **private} if self.what == "model" else super().personal(task, shared, private)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shared", "init gave a dict; it must give two dicts of arrays"),
        ("pair", "fit gave a Update; it must give an update and a dict"),
        ("seen", "fit gave a list as private 'seen'; make it a numpy array of numbers"),
        ("words", "fit gave <U1 .1,. as private 'words'; make it a numpy array of numbers"),
        ("module", "fit gave a Tensor as private 'module'; make it a numpy array of numbers"),
        ("model", "personal gave a dict; it must give a model, such as served"),
    ],
)
def test_what_an_algorithm_gives_in_another_form_is_named(what: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm '.*Slip': {said}"):
        sdk.simulate(Slip(what=what), "mypkg.sets:rings", "mypkg.nets:plain", rounds=1)


@pytest.mark.parametrize(
    ("what", "said"),
    [("metrics", r"metrics=\{1: 2.0\} must be numbers by their names"), ("weight", "weight='3' must be")],
)
def test_an_update_that_none_can_be_is_refused_where_it_is_made(what: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"update of 'client-.*': {said}"):
        sdk.simulate(Slip(what=what), "mypkg.sets:rings", "mypkg.nets:plain", rounds=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_metrics_are_numbers_of_numpy_or_torch_too(tmp_path: Path, workers: int) -> None:
    """A run that was saved ended in a TypeError after its first round, and workers were said to be short of memory."""
    result = sdk.simulate(
        Slip(what="numpy"), "mypkg.sets:rings", "mypkg.nets:plain", rounds=2, save=tmp_path / "run", workers=workers
    )
    assert [point.metrics for point in result.curve] == [{"loss": float(np.float32(0.1)), "seen": 3.0}] * 2


@dataclass(frozen=True, kw_only=True)
class Strays(First):
    """Gives its own state, or the shared one, in another form."""

    how: str = "none"

    def init(self, shared: Tensors) -> Any:
        return None if self.how == "stateless" else super().init(shared)

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> Any:
        after, state = super().apply(shared, state, updates)
        forms: dict[str, Any] = {
            "none": None,
            "lost": ({}, state),
            "wide": ({k: v.astype(np.float64) for k, v in after.items()}, state),
            "short": ({k: v[:-1] for k, v in after.items()}, state),
            "nan": ({k: v * np.float32(np.nan) for k, v in after.items()}, state),
        }
        return forms[self.how]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stateless", "gave a NoneType; it must give a dict of arrays"),
        ("none", "gave a NoneType; it must give the shared arrays and its own state"),
        ("lost", "gave a NoneType as '0.weight'; it must stay float32 .8, 4."),
        ("wide", "gave float64 .8, 4. as '0.weight'; it must stay float32 .8, 4."),
        ("short", "gave float32 .7, 4. as '0.weight'; it must stay float32 .8, 4."),
        ("nan", "gave NaN or infinity in '0.weight', and every device would learn from it; make it finite"),
    ],
)
def test_what_a_server_rule_gives_in_another_form_is_named(how: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"aggregator Strays: (init|apply) {said}"):
        sdk.simulate("fedavg", "mypkg.sets:rings", "mypkg.nets:plain", rounds=1, aggregator=Strays(how=how))


@dataclass(frozen=True, kw_only=True)
class Writes(FedHalf):
    """Writes into what it was given, once it has learned from it."""

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> Any:
        found = super().fit(task, shared, private)
        for value in shared.values():
            np.multiply(value, np.float32(0.5), out=value)
        return found

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Any:
        found = super().personal(task, shared, private)
        for value in (*shared.values(), *private.values()):
            np.multiply(value, np.float32(0.5), out=value)
        return found


def test_an_algorithm_that_writes_into_what_it_was_given_changes_nothing_for_others() -> None:
    runs = [
        sdk.simulate(kind(), "mypkg.sets:rings", "mypkg.nets:plain", rounds=2, evaluate_every=1)
        for kind in (FedHalf, Writes)
    ]
    assert equal(runs[0].learned.shared, runs[1].learned.shared)
    assert runs[0].curve == runs[1].curve


def reckoned(tensors: Tensors) -> Tensors:
    """The same values, as arithmetic leaves them: numpy makes numbers of arrays without dimensions."""
    return {k: v * v.dtype.type(1) for k, v in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Reckons(FedHalf):
    """Does arithmetic on all that passes through its hands, if it is asked to."""

    how: Any = reckoned
    aggregator = property(lambda self: Reckoned(how=self.how))

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> Any:
        state = self.how(train(task, self.how({**shared, **private})))
        return update(task, state, shared), self.how(only(state, private))

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Any:
        return served(task, self.how({**shared, **private}))


@dataclass(frozen=True, kw_only=True)
class Reckoned(First):
    """Likewise, of a server rule."""

    how: Any = reckoned

    def apply(self, shared: Tensors, state: Tensors, updates: Iterable[Update]) -> Any:
        return tuple(map(self.how, super().apply(shared, state, updates)))


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_what_arithmetic_makes_of_an_array_without_dimensions_is_one_to_all(engine: str) -> None:
    runs = [
        sdk.simulate(kind, "mypkg.sets:rings", "mypkg.nets:AnswerFirst", rounds=2, engine=engine)
        for kind in (Reckons(how=dict), Reckons())
    ]
    assert equal(runs[0].learned.shared, runs[1].learned.shared)
    assert runs[0].accuracy == runs[1].accuracy


def test_an_algorithm_of_somebody_elses_learns_by_its_name() -> None:
    half, whole, plain = (
        simulate(run, members())
        for run in (run_of("mypkg.mine:FedHalf"), run_of("mypkg.mine:FedHalf", pull=1), run_of("fedavg"))
    )
    assert equal(whole.shared, plain.shared), "the whole way is FedAvg"
    assert not equal(half.shared, plain.shared)


def test_a_run_names_an_object_so_that_everybody_finds_it() -> None:
    name, hparams = algorithms.name_of(FedHalf(pull=0.25))
    assert (name, hparams) == ("mypkg.mine:FedHalf", {"pull": 0.25})
    assert algorithms.load(name, hparams) == FedHalf(pull=0.25)
    assert algorithms.name_of(FedProx(mu=0.5))[0] == "fedprox"
    algorithms.GROUP.require_travels(name)
    run = run_of(name, **hparams)
    assert Run.of(json.loads(run.to_json())) == run
    assert Run.from_json(run.to_json(), allow=None) == Run.from_json(run.to_json(), allow=("mypkg",)) == run
    for allow in ((), ("other", "mypkg.mine")):
        with pytest.raises(ConfigError, match=r"is of package 'mypkg', which is not allowed; .*allow = \[\"mypkg\"\]"):
            Run.from_json(run.to_json(), allow)
    for name in ("mypkg.broken:X", "mypkg.mine:MaskedMean", "mypkg.mine:borrowed.PREFIX", "os:abort"):
        with pytest.raises(ConfigError):
            Run.from_json(run.to_json().replace("mypkg.mine:FedHalf", name), allow=("mypkg",))


def test_every_algorithm_is_named_by_its_own_name_and_options() -> None:
    for name in algorithms.ALGORITHMS:
        made = algorithms.load(name)
        assert algorithms.name_of(made)[0] == name
        assert algorithms.load(*algorithms.name_of(made)) == made


def test_what_has_no_name_elsewhere_stays_in_this_process() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(FedHalf):
        pull: float = 0.5

    name, hparams = algorithms.name_of(Own(pull=1.0))
    assert algorithms.load(name, hparams) == Own(pull=1.0)
    assert algorithms.name_of(Own(pull=0.25)) == (name, {"pull": 0.25}), "a class is kept once"
    assert equal(simulate(run_of(name, **hparams), members()).shared, simulate(run_of("fedavg"), members()).shared)
    with pytest.raises(ConfigError, match="is known in this process only; write it into a module of a package"):
        algorithms.GROUP.require_travels(name)

    @dataclass(frozen=True, kw_only=True)
    class Own(FedHalf):  # type: ignore[no-redef]
        pull: float = 0.75

    assert algorithms.name_of(Own())[0] != name
    assert algorithms.load(name).pull == 0.5  # type: ignore[attr-defined]


def test_an_object_with_more_than_options_stays_itself() -> None:
    def half(*_: Any) -> Any:
        raise NotImplementedError

    for odd in (FFGG(objective=half), FedHalf(pull=np.float32(0.5))):
        name, hparams = algorithms.name_of(odd)
        assert hparams == {}
        assert algorithms.load(name) is odd
        with pytest.raises(ConfigError, match="option 'pull' is unknown; it takes none"):
            algorithms.load(name, {"pull": 1})
    assert algorithms.load("mypkg.mine:HALF") == FedHalf(pull=0.25)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fedavgg", r"algorithm 'fedavgg' is unknown \(did you mean 'fedavg'\?\); use local, fedavg.*or module:Name"),
        ("mypkg.mine:FedHalv", r"mypkg.mine has no 'FedHalv' \(did you mean 'FedHalf'\?\)"),
        ("mypkg.mine:FedHalf.pul", "mypkg.mine has no 'pul'"),
        ("mypkg.mine:borrowed", "'borrowed' in mypkg.mine is a module"),
        ("mypkg.mine:borrowed.PREFIX", "'borrowed' in mypkg.mine is a module"),
        ("mypkg.minne:FedHalf", r"there is no module 'mypkg.minne'; install its package"),
        ("mypkk:FedHalf", "there is no module 'mypkk'"),
        ("fedavg:mu", "'fedavg' is built in and takes NAME=VALUE after the colon"),
        ("mypkg.broken:X", r"importing mypkg.broken failed \(RuntimeError: nothing works today\); mend that module"),
        ("mypkg.leaving:X", r"importing mypkg.leaving failed \(SystemExit: goodbye\)"),
        ("mypkg.lacking:X", "importing mypkg.lacking failed .*nobody_has_this_package"),
        ("mypkg.mine:First", "First has no aggregator; see talaria.algorithms.base.Algorithm"),
        ("mypkg.mine:NoFit", "NoFit has no fit"),
        ("mypkg.mine:NoCard", "NoCard.card must be a talaria.algorithms.base.Card"),
        ("mypkg.mine:Forgetful", "Forgetful is no frozen dataclass"),
        ("mypkg.mine:parted", "has no aggregator"),
        (".mine:X", "neither a name nor module:Name"),
        ("mypkg..mine:X", "neither a name nor module:Name"),
        ("mypkg.mine:", "neither a name nor module:Name"),
        ("mypkg.mine:X\nY", "neither a name nor module:Name"),
        ("mypkg/mine:X", "neither a name nor module:Name"),
        ("mypkg.mine:FedHalf()", "neither a name nor module:Name"),
        ("ｍypkg.mine:FedHalf", "neither a name nor module:Name"),
        ("a" * 100_000, "neither a name nor module:Name"),
        (f"a:{'b' * 100_000}", "neither a name nor module:Name"),
        ("", "algorithm '' is unknown"),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_be_right(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        run_of(name)
    assert len(str(refused.value)) < 800


def test_wrong_options_of_an_algorithm_of_ones_own() -> None:
    for given, says in (
        (
            {"pul": 1},
            r"algorithm 'mypkg.mine:FedHalf': option 'pul' is unknown \(did you mean 'pull'\?\); it takes pull",
        ),
        ({"pull": "far"}, "pull='far' must be a number"),
        ({"pull": True}, "pull=True must be a number"),
        ({"pull": 2.0}, r"fedhalf: pull=2.0 must be in \(0, 1\]"),
    ):
        with pytest.raises(ConfigError, match=says):
            algorithms.load("mypkg.mine:FedHalf", given)
    with pytest.raises(ConfigError, match=r"FedHalf is a class; make one, such as FedHalf\(\)"):
        algorithms.name_of(FedHalf)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="First has no aggregator"):
        algorithms.name_of(First())  # type: ignore[arg-type]


# -- aggregators


def test_a_server_rule_of_somebody_elses_folds_by_its_name() -> None:
    rule = registry.load({"name": "mypkg.mine:First", "f": 1})
    assert rule == First(f=1)
    assert registry.load("mypkg.mine:First") == First()
    one = simulate(run_of("fedavg"), members(), aggregator=rule)
    assert equal(one.shared, simulate(run_of("fedavg"), members(), aggregator=First()).shared)
    assert not equal(one.shared, simulate(run_of("fedavg"), members()).shared)
    clipped = registry.load({"name": "clipped", "norm": 1, "inner": {"name": "mypkg.mine:First", "f": 2}})
    assert clipped.inner == First(f=2)  # type: ignore[attr-defined]


def test_what_is_no_rule_is_refused() -> None:
    for spec, says in (
        ("mypkg.mine:FedHalf", "a FedHalf has no apply; see talaria.aggregate.base.Aggregator"),
        ("mypkg.mine:WHOLE", "has no 'WHOLE'|is a tuple; name a class"),
        ({"name": "mypkg.mine:First", "f": 0}, "first: f=0 must be at least 1"),
        ({"name": "mypkg.mine:First", "g": 0}, "option 'g' is unknown"),
        ("median:f", "'median' is built in and takes NAME=VALUE after the colon"),
        ("meddian:f", r"there is no module 'meddian' \(did you mean 'median'\?\)"),
    ):
        with pytest.raises(ConfigError, match=says):
            registry.load(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("median", "median", {}),
        ("median:f=2", "median", {"f": 2}),
        ("trimmed_mean:f=2,trim=1", "trimmed_mean", {"f": 2, "trim": 1}),
        ("mypkg.mine:First", "mypkg.mine:First", {}),
        ("mypkg.mine:First:f=1", "mypkg.mine:First", {"f": 1}),
        ("mypkg:First:f=1,g=a:b", "mypkg:First", {"f": 1, "g": "a:b"}),
        ("akt:proxy=C:own.npz,lr=0.1", "akt", {"proxy": "C:own.npz", "lr": 0.1}),
        ("first:", "first", {}),
    ],
)
def test_the_command_lines_form_is_taken_apart(text: str, name: str, options: dict[str, Any]) -> None:
    assert taken_apart(text, "aggregator") == (name, options)


# -- entry points and the command


def test_entry_points_of_an_installed_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path / "one")))
    assert algorithms.load("fedhalf", {"pull": 1}) == FedHalf(pull=1.0)
    assert registry.load({"name": "first", "f": 2}) == First(f=2)
    assert "fedhalf" in algorithms.GROUP.names()
    assert algorithms.GROUP.package("fedhalf") == "mypkg"
    with pytest.raises(ConfigError, match=r"'fedhal' is unknown \(did you mean 'fedhalf'\?\)"):
        algorithms.load("fedhal")
    monkeypatch.syspath_prepend(str(installed(tmp_path / "two", "mypkg.mine:HALF", "other")))
    with pytest.raises(ConfigError, match=r"'fedhalf' is claimed by mypkg.mine:FedHalf, mypkg.mine:HALF"):
        algorithms.load("fedhalf")


def test_the_command_takes_a_package_of_ones_own(home: Path) -> None:
    words = ("simulate", "-d", "npz:data.npz", "--rounds", "2", "--json")
    mine = ("-a", "mypkg.mine:FedHalf", "-o", "pull=0.25", "--aggregator", "mypkg.mine:First:f=2")
    done = talaria(home, *words, *mine)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["algorithm"], told["aggregator"]) == ("mypkg.mine:FedHalf", "mypkg.mine:First:f=2")
    assert told["options"] == {"pull": 0.25}

    elsewhere = installed(home / "site")
    shutil.move(home / "mypkg", elsewhere / "mypkg")
    gone = talaria(home, *words, *mine)
    assert gone.returncode == 1
    assert "there is no module 'mypkg'; install its package where this runs" in gone.stderr
    by_entry = ("-a", "fedhalf", "-o", "pull=0.25", "--aggregator", "first:f=2")
    again = talaria(home, *words, *by_entry, path=elsewhere)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["model_digest"] == told["model_digest"]
    listed = talaria(home, "algorithms", "--json", path=elsewhere)
    assert "fedhalf" in [row["name"] for row in json.loads(listed.stdout)], listed.stderr


def test_nothing_in_the_current_folder_takes_the_place_of_what_is_installed(home: Path) -> None:
    """A folder of somebody else's is no place to import ``yaml`` or ``talaria`` from, only what is named and nowhere
    else."""
    for name in ("onnx", "rich", "talaria_export"):
        (home / f"{name}.py").write_text("raise SystemExit('the folder was searched first')")
    done = talaria(home, "simulate", "-a", "mypkg.mine:FedHalf", "-d", "npz:data.npz", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr


# -- options


def test_options_are_read_as_they_are_declared() -> None:
    def taken(a: int, b: float = 1.0, c: tuple[int, ...] | None = None, d: Path = Path(), *, e: str = "x") -> None: ...

    known = options_of(taken)
    assert known.read("it", {"a": 1, "b": 2, "c": [1, 2], "d": "x/y"}) == {
        "a": 1,
        "b": 2.0,
        "c": (1, 2),
        "d": Path("x/y"),
    }
    assert isinstance(known.read("it", {"a": 1, "b": 2})["b"], float)
    for given, says in (
        ({}, "it: option 'a' is missing; it must be a whole number"),
        ({"a": 1.0}, "it: a=1.0 must be a whole number"),
        ({"a": True}, "a=True must be a whole number"),
        ({"a": 1, "b": float("nan")}, "b=nan must be a number"),
        ({"a": 1, "b": 1 << 5000}, "b=.* must be a number"),
        ({"a": 1, "c": ["1"]}, r"c=\['1'\] must be a list of whole numbers \(9,10\) or left out"),
        ({"a": 1, "e": 3}, "e=3 must be text"),
        ({"a": 1, "ee": 3}, r"option 'ee' is unknown \(did you mean 'e'\?\); it takes a, b, c, d, e"),
    ):
        with pytest.raises(ConfigError, match=says):
            known.read("it", given)


def test_options_of_what_says_little() -> None:
    @dataclass(frozen=True)
    class Odd:
        a: "NobodyKnowsThis" = 3  # type: ignore[name-defined]  # noqa: F821
        b: list[int] = field(default_factory=list)

    def more(x: int, **rest: Any) -> None: ...

    assert options_of(Odd).read("odd", {"a": 4}) == {"a": 4}
    with pytest.raises(ConfigError, match="odd: a='x' must be a whole number"):
        options_of(Odd).read("odd", {"a": "x"})
    assert options_of(more).read("more", {"x": 1, "width": 3}) == {"x": 1, "width": 3}
    assert options_of(print).more or options_of(print).known


def test_a_module_of_ones_own_is_not_imported_before_it_is_named() -> None:
    group = plugins.Group("thing", "talaria.nothing", {"one": 1})
    assert group.find("one") == 1
    assert group.package("mypkg.broken:X") == "mypkg"
    assert group.package("one") is None
    with pytest.raises(ConfigError, match=r"thing 'mypkg.broken:X' is of package 'mypkg', which is not allowed; ask"):
        group.require_allowed("mypkg.broken:X", ("other",), "ask for {package}")
    with pytest.raises(ConfigError, match="is of package 'talaria', which is not allowed"):
        group.require_allowed("mypkg.mine:MaskedMean", ("mypkg",), "ask for {package}")
    group.require_allowed("mypkg.mine:First", ("mypkg",), "ask for {package}")
    group.require_allowed(3, (), "")
