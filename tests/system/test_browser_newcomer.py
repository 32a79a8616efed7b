"""A newcomer labels a minute of recordings in a real Chromium, where the fleet's model becomes theirs."""

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from javascript import Chromium, packages, shown, when

import talaria
from talaria.federated import rounds
from talaria.federated.run import Member
from talaria.training.loop import predict
from talaria_export import Predictor
from talaria_export.runtime.verify import verify_bundle

BROWSER = Path(__file__).parents[2] / "examples" / "browser"
NEWCOMER = "s10-right"
LATER = "document.getElementById('results').textContent"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("talaria_browser_personalize", BROWSER / "personalize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def chromium(tmp_path):
    browser = Chromium(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.mark.timeout(600)
def test_a_newcomer_gains_in_the_page_what_a_device_gains(example, chromium, tmp_path):
    data = talaria.data.load("smartwatch")
    run = example.a_run(rounds=2)
    shared = example.learned(run, {name: data.clients[name] for name in list(data.clients)[::4]})
    own = data.newcomers[NEWCOMER]
    path = tmp_path / "page.html"
    dist = packages(BROWSER) / "onnxruntime-web" / "dist"
    path.write_text(example.page(run, shared, NEWCOMER, own, data.labels, dist))

    downloads = tmp_path / "downloads"
    downloads.mkdir()
    chromium.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
    session, ask = shown(chromium, path)
    status = "document.getElementById('status')?.textContent"
    assert "Label what you know" in ask(when(f"(({status} ?? 'Loading').startsWith('Loading') ? '' : {status})"))
    assert ask("document.getElementById('learn').disabled") is True
    # The stretches are in the order of the exercises, one for each; the wearer knows.
    chosen = "[...document.querySelectorAll('select')]"
    assert ask(f"{chosen}.length") == len(data.labels)
    named = json.dumps(list(data.labels))
    ask(f"{chosen}.forEach((one, i) => {{ one.value = {named}[i]; one.onchange() }})")
    ask("document.getElementById('learn').click()")
    found = json.loads(ask(when(LATER)))
    assert "error" not in found, found
    assert found["windows"] == len(own.train)
    assert ask("document.getElementById('after').textContent") == f"{100 * found['after']:.1f} %"

    member = Member(NEWCOMER, own.train, own.val, engine="onnx")
    untuned = replace(run, hparams={**run.hparams, "tune_epochs": 0})
    before, after = (measured(one, member, shared, own) for one in (untuned, run))
    assert found["before"] == pytest.approx(before, abs=0.02)
    assert found["after"] - found["before"] >= after - before - 0.02
    assert found["after"] > found["before"] + 0.1

    ask("document.getElementById('save').click()")
    bundle = arrived(downloads / "me.talaria")
    report = verify_bundle(bundle, samples=(own.test.x, own.test.y), seconds=0)
    assert report.ok, report.checks
    assert report.figures["accuracy"] == pytest.approx(found["after"])
    named = np.array(data.labels)[own.test.y]
    assert np.mean(named == Predictor(bundle)(own.test.x).labels) == pytest.approx(found["after"])

    chromium.ask("Emulation.setDeviceMetricsOverride", session, width=360, height=640, deviceScaleFactor=1, mobile=True)
    assert ask("document.documentElement.scrollWidth") == 360, "a telephone shows all of its width"

    # Who labels one stretch alone teaches it one exercise, and is told what that is worth.
    ask(f"{chosen}.slice(1).forEach((one) => {{ one.value = ''; one.onchange() }})")
    ask("document.getElementById('learn').click()")
    assert "does better than this one: label more stretches" in ask(when(f"!{status}.endsWith('...') && {status}"))


def test_what_is_asked_wrongly_is_said_before_anything_is_learned(example, monkeypatch, capsys, tmp_path):
    for given, said in (
        (["--newcomer", "nobody"], "nobody has that name; choose from s09-left, s09-right"),
        (["--rounds", "0"], "rounds=0 must be at least 1"),
        (["-o", str(tmp_path / "none" / "page.html")], "there is no folder"),
    ):
        monkeypatch.setattr("sys.argv", ["personalize.py", *given])
        with pytest.raises(SystemExit):
            example.main()
        assert said in capsys.readouterr().err


def measured(run, member, shared, own):
    """The accuracy that a Python device gets on the newcomer's later windows."""
    model = rounds.personalize(run, member, shared, None)
    return float((predict(model, own.test.x).argmax(1) == own.test.y).mean())


def arrived(path):
    """The file, once the browser has put it there."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, [p.name for p in path.parent.iterdir()]
        time.sleep(0.05)
    return Path(path)
