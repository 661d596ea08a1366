"""The notebook of the documents, cell after cell, on the rollouts of a tiny run."""

import json
import linecache
from pathlib import Path

from quiver.flows.recipe import load
from quiver.stages.core.store import Store
from tests.flows.conftest import stay_here, write_recipe
from tests.writing import run_iteration

NOTEBOOK = Path(__file__).parents[2] / "deployments/docs/experiments.ipynb"


def test_every_cell_of_the_notebook_runs(tmp_path, monkeypatch, capsys):
    folder = write_recipe(tmp_path / "work")
    stay_here(folder, monkeypatch, [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run_iteration(load("recipe.toml"), Store("store"))
    names = {"__name__": "__main__"}
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace('RUN = "sums"', 'RUN = "tiny"')
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "clear the outputs"
            name = f"<{cell['id']}>"  # as IPython does, so that a function has a source
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), names)
    assert "of 4 groups have contrast" in capsys.readouterr().out
    store = Store("store")
    rewards = store.open(names["nearness"])
    assert rewards.table()["reward"].to_pylist() == names["table"]["near"].tolist()
    first, second = (store.open(ref).manifest for ref in names["policies"].values())
    assert first.input("policy") == second.input("policy")
    assert (first.input("rewards").ref, second.input("rewards").ref) == (
        "tiny/rewards@1",
        str(rewards.ref),
    )
