"""Every benchmark begins; the examples run in tests of their own."""

from pathlib import Path

import forked
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
BENCHMARKS = [*sorted(FOLDER.glob("*.py")), FOLDER / "peers" / "run.py"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    folder = tmp_path_factory.mktemp("help")
    return forked.run({script.stem: (folder, script, "--help") for script in BENCHMARKS}, folder)


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_a_benchmark_finds_what_it_imports(script: Path, told: dict[str, tuple[str, int]]) -> None:
    said, status = told[script.stem]
    assert status == 0, said[-2000:]


def test_what_is_wrong_with_a_comparison_of_peers_is_said_before_any_is_installed(tmp_path: Path) -> None:
    lost = tmp_path / "lost.npz"
    wrong = {
        f"--partition {lost}": f"{lost}: no such file",
        "--data smartwatch --partition x.npz": "option 'partition' is unknown",
        "--turns 0": "--turns 0: take 1 at least",
        "--only pfl --clients 0": "--clients 0: take 1 at least",
        "--data smartwatch --out /dev/null/peers.json": "/dev/null",
    }
    script = FOLDER / "peers" / "run.py"
    told = forked.run({words: (tmp_path, script, *words.split()) for words in wrong}, tmp_path)
    for words, said in wrong.items():
        assert told[words][1] == 2, told[words][0][-2000:]
        assert said in told[words][0]
