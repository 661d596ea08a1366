"""The recipe squares: its rows, a small run of every stage, and what people see of its pictures."""

import base64
import doctest
import json
import re
import shutil
import subprocess
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

from quiver.deployments.recipes import squares
from quiver.flows.recipe import load
from quiver.stages.common.images.decoder import open_image
from quiver.stages.common.store import Store
from quiver.stages.report.describe import describe
from quiver.stages.report.samples import best_and_worst, groups
from quiver.stages.report.stage import write
from tests.writing import run_iteration

ROOT = Path(__file__).parents[2]
RECIPE = "deployments/recipes/squares.toml"
SMALL = [
    "policy.arguments={steps=5,seed=3}",
    "data.limit=8",
    "generate.samples_per_prompt=4",
    "data.held_out={arguments={split='held_out',count=6}}",
]


def test_the_examples_in_the_docstring():
    assert doctest.testmod(squares).failed == 0


def test_a_picture_shows_what_its_answer_says():
    for row in squares.rows("train", count=50):
        pixels = np.array(open_image(row["picture"]["bytes"]))
        words = row["answer"].split()
        for half, colour, side in ((0, *words[:2]), (1, *words[2:])):
            part = pixels[16 * half : 16 * half + 16]
            found = (part == squares.COLOURS[colour]).all(-1)
            assert found.sum() == squares.SIDE**2
            assert (found.nonzero()[1] < 16).all() == (side == "left")


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("red left blue right", 1.0),
        ("red left blue left", 0.75),
        ("blue right red left", 0.0),
        ("red left blue", 0.0),
        ("red left blue right red", 0.0),
    ],
)
def test_each_right_word_counts_where_there_are_four(said, share):
    assert squares.right_words([said], ["red left blue right"]) == [share]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every stage of a small run: its store, and the versions by kind."""
    with chdir(ROOT):
        recipe = load(RECIPE, SMALL)
        store = Store(tmp_path_factory.mktemp("squares") / "store")
        return store, run_iteration(recipe, store)


@pytest.fixture(scope="module")
def page(made) -> Path:
    """The report of the run."""
    store, _ = made
    return write(store, "squares")


def test_every_stage_of_a_small_run(made, page):
    store, refs = made
    assert store.open(refs["policy"]).manifest.metrics["audit"]["max_gap"] < 1e-4

    for kind in ("prompts", "rollouts", "rewards"):
        lines = describe(store, store.open(refs[kind]), rows=1)
        assert any("PNG, 32 × 32" in line for line in lines if "picture" in line)
    stored = {
        row["group_id"]: row["images"][0]["bytes"]
        for row in store.open(refs["prompts"]).table().to_pylist()
    }
    rewards = store.open(refs["rewards"])
    samples = best_and_worst(store, rewards).rows
    assert len(samples) == 10
    for row in samples:
        (image,) = row["images"]
        assert image["bytes"] == stored[row["group_id"]]
    urls = re.findall(
        r'<img src="data:image/png;base64,([^"]+)" alt="picture 1">', page.read_text()
    )
    assert len(urls) >= 10
    shown = open_image(base64.b64decode(urls[0]))
    first = samples[0]["images"][0]["bytes"]
    assert (np.array(shown) == np.array(open_image(first))).all()
    assert all(len(group.rows[0]["images"]) == 1 for group in groups(store, rewards))


def test_the_reports_own_policy_lets_its_pictures_show_and_nothing_else(page):
    content = page.read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', content)
    directives = dict(part.split(maxsplit=1) for part in policy.split("; "))
    assert directives == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": "'unsafe-inline'",
    }
    assert {url.partition(":")[0] for url in re.findall(r'\ssrc="([^"]+)"', content)} == {"data"}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
def test_a_browser_shows_every_picture_of_the_report(page, tmp_path):
    """The page runs no script, so a page around it looks."""
    around = tmp_path / "around.html"
    around.write_text(
        f'''<iframe src="{page.as_uri()}"></iframe><p id="widths"></p><script>
        onload = () => document.getElementById("widths").textContent = JSON.stringify(
            [...document.querySelector("iframe").contentDocument.images].map(x => x.naturalWidth))
        </script>'''
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = ["chromium", *options, profile, "--dump-dom", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (widths,) = re.findall(r'<p id="widths">([^<]+)</p>', done.stdout)
    assert len(json.loads(widths)) >= 10 and {*json.loads(widths)} == {32}
