"""What people are shown of a store: `quiver ls`, `quiver show` and `quiver diff`, in words."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from quiver.flows.cli import versions
from quiver.flows.cli.compare import diff
from quiver.flows.look.columns import picked
from quiver.flows.look.describe import score_line
from quiver.flows.look.episodes import pieces_of
from quiver.flows.look.joined import prompt_fields
from quiver.flows.look.lineage import origin_of
from quiver.flows.look.stage import default_path
from quiver.schemas import fields, prompts
from quiver.schemas.errors import ConfigError
from quiver.schemas.manifest import from_json
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store, marks
from quiver.stages.core.store.listing import EXPIRED
from tests.benchmarks.made import (
    make_prompts,
    make_rewards,
    rollouts_table,
    write_rollouts,
    write_version,
)
from tests.stages.optimize import world
from tests.tiny import make_policy
from tests.writing import run_here


@pytest.fixture(scope="module")
def store(finished, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("looking") / "store"
    shutil.copytree(finished / "finished", path)
    return str(path)


@pytest.fixture
def changing(store, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(store, tmp_path / "store")


def test_a_diff_of_rewards_says_what_became_of_them(store, capsys):
    versions.diff("golden/rewards@1", "golden/rewards@5", store)
    before, after = (
        Store(store).open(f"golden/rewards@{n}").table()["reward"].to_numpy().astype(float)
        for n in (1, 5)
    )
    assert capsys.readouterr().out.splitlines()[-5:] == [
        "rows, paired by rollout_id: 16 in both, 0 only in the first, 0 only in the second",
        f"  reward: {(before != after).sum()} differ",
        "  0 have a reward only in the second, 0 only in the first",
        "  2 change places within their group, 0 their sign",
        f"  the mean changes by {(after - before).mean():.4g}; "
        f"correlation {np.corrcoef(before, after)[0, 1]:.4g}",
    ]


def test_show_joins_what_is_told_of_a_row(store, capsys):
    versions.show("golden/rewards@3", 12, store)
    shown = capsys.readouterr().out
    rows = Store(store).open("golden/rewards@3").table().to_pylist()
    failed = [row for row in rows if row["errors"]["sometimes"] is not None]
    assert shown.count("\n  prompt ") == shown.count("\n  reference ") == 12
    assert len(failed) == shown.count("\n  error       sometimes: ") == 4
    first = shown[shown.index("1 of 12: ") :].split("\n\n")[0].splitlines()
    assert first == [
        f"1 of 12: {rows[0]['rollout_id']}",
        "  prompt      0+1=",
        "  reference   1",
        "  columns     name n0 · number 0",
        "  completion  0+1G",
        "  ended by    length, after 4 tokens",
        "  reward      4",
        "  parts       sometimes 4",
    ]


def test_columns_and_parts_are_shown_by_the_names_that_a_recipe_takes():
    row = {"prompt": "1+1=", "columns": {"extra_info": 7}, "reward": 1.0, "parts": {"as_is": 1.0}}
    texts = {piece.name: piece.text for piece in pieces_of(row)}
    assert (texts["columns"], texts["parts"]) == ("extra_info 7", "as_is 1")


def test_a_column_that_equals_the_reference_or_the_prompt_is_shown():
    """Only the columns that these came from are left out."""
    own = {"question": "easy", "answer": 1, "difficulty": 1, "ok": True, "level": "easy"}
    row = {"messages": None, "prompt_text": "easy", "columns": own}
    texts = {piece.name: piece.text for piece in pieces_of(prompt_fields(row))}
    assert texts["reference"] == 1
    assert texts["columns"] == "difficulty 1 · ok yes · level easy"


def test_a_run_that_is_not_there_is_no_empty_list(store, command):
    for words in (("ls", "goldn"), ("ls", "goldn", "--size")):
        code, answer = command(*words, "--store", store)
        assert code == 5 and "did you mean golden?" in answer["error"]["message"]


def test_show_tells_a_policys_steps_and_an_evaluations_interval(store, capsys):
    versions.show("golden/policy@2", 10, store)
    policy = capsys.readouterr().out
    losses = Store(store).open("golden/updates@2").table()["loss"].to_pylist()
    assert "algorithm   dapo" in policy and "the last 2 of 2 steps:" in policy
    assert [line.split()[1] for line in policy.splitlines()[-2:]] == [f"{x:.4g}" for x in losses]
    versions.show("held/evaluations@2", 0, store)
    shown = re.search(
        r"score       -0.0014 ± 0.0392 \(standard error\), 95 % interval (\S+) … (\S+), over 3 prompts",
        capsys.readouterr().out,
    )
    half = 4.30265 * 0.0392  # of t with two degrees of freedom
    ends = [float(end) for end in shown.groups()]
    assert ends == pytest.approx([-0.0014 - half, -0.0014 + half], abs=5e-4)
    assert score_line({"score": 0.5, "stderr": None, "n": 1}) == "0.5 over 1 prompt"


def test_show_tells_steps_and_rows_whose_rollouts_are_gone(store, changing, capsys):
    shutil.rmtree(changing / "golden/rollouts/v000001")
    for ref in ("golden/updates@2", "golden/prompts@1", "golden/rewards@1"):
        versions.show(ref, 1, str(changing))
    shown = capsys.readouterr().out
    (loss, _) = Store(store).open("golden/updates@2").table()["loss"].to_pylist()
    assert f"{loss:.4g}" in shown and "1 of 4: " in shown
    assert "its rollouts are missing: it was not made from rollouts\n{'rollout_id': " in shown


def test_show_prints_the_manifest_where_it_is_asked_for(store, capsys):
    versions.show("golden/rewards@1", None, store, True)
    fields = json.loads(capsys.readouterr().out)
    path = Store(store).open("golden/rewards@1").files.path("manifest.json")
    written = from_json(path.read_bytes(), "golden/rewards@1")
    assert fields == written.model_dump(mode="json", by_alias=True)


def test_show_prints_the_manifest_of_what_expired_with_its_mark(changing, capsys, in_json):
    path = str(changing)
    opened = Store(path)
    written = opened.open("golden/rewards@1").manifest.model_dump(mode="json", by_alias=True)
    marks.write(opened.storage, Ref("golden", "rewards", 1), EXPIRED, "gc, keep = 1")
    mark = str(opened.with_expired().open("golden/rewards@1").mark)
    versions.show("golden/rewards@1", None, path, True)
    assert json.loads(capsys.readouterr().out) == written | {"expired": mark}
    answer = in_json(versions.show, "golden/rewards@1", None, path, True)
    assert (answer["manifest"], answer["rows"]) == (written, [])
    assert answer["expired"] == mark and mark.endswith("gc, keep = 1")


def test_each_question_about_a_run_has_a_report_of_its_own(changing, capsys):
    for named in ("golden", "golden/policy@1"):
        for beside in (None, "own"):
            versions.report(named, beside, None, str(changing))
    of_run, compared, of_policy, policy_compared = map(Path, capsys.readouterr().out.split())
    assert [of_run.name, of_policy.name] == ["report.html", "report-policy-1.html"]
    assert compared.name == "report-beside-own.html"
    assert policy_compared.name == "report-policy-1-beside-own.html"
    assert "golden/policy@0 to golden/policy@2." in of_run.read_text()
    assert "golden/policy@0 to golden/policy@1." in of_policy.read_text()
    assert "Not shown" not in of_run.read_text()
    assert "Not shown: golden/policy@2, where" in of_policy.read_text()
    with pytest.raises(ConfigError, match="a report shows a run or the line of a policy"):
        versions.report("golden/rewards@1", None, None, str(changing))


def test_reports_of_runs_in_buckets_go_into_different_files_here():
    stores = ("s3://a/rl", "gs://a/rl", "s3://a", "s3://b/rl")
    paths = {default_path(url, run) for url in stores for run in ("rl", "tiny")}
    paths |= {default_path(stores[0], "tiny", "report-policy-3.html")}
    assert len(paths) == 9 and {path.parent for path in paths} == {Path.cwd()}
    assert default_path("s3://a/rl", "tiny").name == "s3+a+rl+tiny+report.html"


def test_the_json_of_ls_and_show_holds_what_it_held(store, in_json):
    rows = in_json(versions.ls, store=store)["versions"]
    assert all(set(row) == {"ref", "rows", "stage", "created"} for row in rows)
    shown = in_json(versions.show, "golden/rewards@1", store=store)
    assert set(shown) == {"ref", "manifest", "rows"}
    table = Store(store).open("golden/rewards@1").table()
    assert shown["rows"] == table.slice(0, 3).to_pylist()


def test_ls_is_a_table(store, capsys):
    versions.ls("held", store)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "version" and lines[0].endswith("when")
    (best,) = [line for line in lines if line.startswith("held/evaluations@2 ")]
    created = Store(store).open("held/evaluations@2").manifest.created[:19].replace("T", " ")
    assert re.split(r" {2,}", best) == [
        "held/evaluations@2", "-0.001389 ± 0.039", "best", "1.8 kB", "6", created
    ]  # fmt: skip
    assert len({len(line) for line in lines[1:]}) == 1, "columns stand below one another"


def test_ls_sums_bytes(store, in_json):
    sizes = in_json(versions.ls, store=store, size=True)
    opened = Store(store)
    for row in sizes["runs"]:
        manifests = [version.manifest for version in opened.versions(row["run"])]
        assert row["versions"] == len(manifests)
        assert row["bytes"] == sum(entry.bytes for m in manifests for entry in m.files)
        assert row["on_disk"] > row["bytes"], "manifests lie there too"
    assert sum(row["versions"] for row in sizes["runs"]) == len(list(opened.refs()))
    assert sizes["store"] >= sum(row["on_disk"] for row in sizes["runs"])


def test_a_damaged_version_and_a_damaged_tag_are_listed_among_the_others(changing, capsys):
    (changing / "held/rewards/.index").unlink(missing_ok=True)  # it has read the manifest
    (changing / "held/rewards/v000001/manifest.json").write_text("{")
    (changing / "held/tags/best/000001.json").write_text("\0")
    for size in (True, False):
        with pytest.raises(SystemExit) as end:
            versions.ls("held", str(changing), size)
        assert end.value.code == 3
        lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert sum(line.startswith("E-CORRUPT held/rewards@1") for line in lines) == 1
    assert not any(" best " in line for line in lines)


def test_no_character_of_a_model_moves_the_cursor(tmp_path, capsys):
    store = Store(tmp_path / "store")
    texts = ["\x1b[31mred\x07\r", "left\u202eright\u200b"]
    rollouts = write_rollouts(store, make_prompts(store, 1), rollouts_table(2, 4, 4), texts)
    rewards = make_rewards(store, rollouts)
    versions.show(str(rewards.ref), 2, store.url)
    shown = capsys.readouterr().out
    assert r"\x1b[31mred\x07\r" in shown and r"left\u202eright\u200b" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_prompts_that_are_none_pair_nothing(changing):
    opened = Store(changing)
    version = opened.open("held/rewards@2")
    inputs = (version.manifest.require_input("rollouts").model_copy(update={"role": "prompts"}),)
    manifest = version.manifest.model_copy(update={"inputs": inputs})
    version.files.path("manifest.json").write_bytes(manifest.to_json())
    rows = diff(opened, "held/rewards@1", "held/rewards@2")["rows"]
    assert (rows["both"], rows["paired_by"]) == (0, "rollout_id")


# -- differences


def test_errors_that_nobody_has_do_not_differ(tmp_path):
    """Though they are those of functions of other names."""
    store = Store(tmp_path / "store")
    rollouts, first = world.make(store, make_policy(store), world.even_share, groups=2)
    second = world.write_rewards(store, rollouts, world.even_share, "other", names=("g",))
    changed = diff(store, str(first.ref), str(second.ref))["rows"]["changed"]
    assert changed == {"parts": 8}


def test_no_number_differs_from_none_and_not_from_itself(tmp_path):
    """In a user's columns: in a list and below a key too."""
    store = Store(tmp_path / "store")
    nan = float("nan")
    first = {"x": [nan, 1.0, nan], "y": [[nan, 2.0]] * 3, "z": [{"deep": nan}] * 3}
    for cells in (first, first, {**first, "x": [nan, nan, 1.0]}, {**first, "y": [[nan]] * 3}):
        rows = pa.array(
            [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
        )
        ids, texts = [f"g{index}" for index in range(3)], ["?"] * 3
        columns = [ids, pa.nulls(3, prompts.MESSAGES), texts, [[5]] * 3, rows]
        schema = fields.with_struct(prompts.SCHEMA, columns=rows.type)
        table = pa.table(columns, names=schema.names).cast(schema)
        write_version(store, "prompts", "prompt", table)
    changed = [
        diff(store, "bench/prompts@1", f"bench/prompts@{number}")["rows"]["changed"]
        for number in (2, 3, 4)
    ]
    assert changed == [{}, {"columns": 2}, {"columns": 3}]


NOTED = {"note": "a half the rate\nfor the night" + " and the day after it" * 3}


@pytest.fixture(scope="module")
def noted(tmp_path_factory) -> Store:
    """A store with the same scores, clipped at two bounds, one of them with a note."""
    store = Store(tmp_path_factory.mktemp("noted") / "store")
    rollouts = write_rollouts(store, make_prompts(store, 4), rollouts_table(16, 4, 4))
    for high, about in ((1.0, {}), (0.5, NOTED)):
        config = {"functions": [{"use": "repetition"}], "reward_clip": [0.0, high]}
        run_here("reward", config, store, rollouts=rollouts.ref, **about)
    return store


def test_a_note_is_kept_and_shown_and_decides_nothing(noted, capsys, in_json):
    plain, with_note = (noted.open(f"bench/rewards@{number}").manifest for number in (1, 2))
    assert (plain.note, with_note.note) == ("", NOTED["note"])
    again = run_here("reward", with_note.config, noted, rollouts="bench/rollouts@1", note="another")
    assert str(again) == "bench/rewards@2" and noted.open(again).manifest.note == NOTED["note"]
    versions.show("bench/rewards@2", 0, noted.url)
    assert "note        a half the rate\\nfor the night and" in capsys.readouterr().out
    versions.ls(store=noted.url)
    header, *_, last = capsys.readouterr().out.splitlines()
    assert header.endswith("  note") and last.endswith(NOTED["note"].replace("\n", "\\n"))
    for _ in ("manifest", "index"):
        rows = in_json(versions.ls, store=noted.url)["versions"]
        assert [row.get("note") for row in rows] == [None, None, None, NOTED["note"]]
    assert origin_of(with_note)["note"] == NOTED["note"]
    with pytest.raises(ConfigError, match="at most 1000 are kept"):
        long = "x" * 1001
        run_here("reward", with_note.config, noted, rollouts="bench/rollouts@1", note=long)


def test_ls_refuses_a_column_that_may_be_several_keys():
    weights = {"reward.functions.0.weight": 1.0, "reward.functions.1.weight": 2.0}
    with pytest.raises(ConfigError, match=r"functions\.0\.weight, reward\.functions\.1\.weight"):
        picked([{}, weights], ["weight"])
    whole = {"optimize.seed": 1, "other.optimize.seed": 2}
    assert picked([whole], ["optimize.seed"]) == [{"optimize.seed": 1}], "a whole key is meant"


def test_ls_shows_the_keys_that_differ_and_those_that_are_named(noted, in_json):
    answer = in_json(versions.ls, store=noted.url, differing=True)["versions"]
    clips = [row["columns"] for row in answer if "rewards" in row["ref"]]
    assert clips == [{"reward.reward_clip": [0.0, 1.0]}, {"reward.reward_clip": [0.0, 0.5]}]
    named = in_json(versions.ls, store=noted.url, columns="functions.0.use, rows")["versions"]
    uses = [row["columns"].get("functions.0.use") for row in named]
    assert uses == [None, None, "repetition", "repetition"]
    with pytest.raises(ConfigError, match="only one of these can be given"):
        versions.ls(store=noted.url, columns="rows", differing=True)


def test_hashes_are_cut_in_tables_alone(store, capsys, in_json):
    key = "functions.0.fingerprint"
    whole = Store(store).open("golden/rewards@3").manifest.config["functions"][0]["fingerprint"]
    short = whole[: len("sha256:") + 12]
    versions.ls("golden", store, columns=key)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("golden/rewards@3 ")]
    assert line.endswith(f"  {short}")
    versions.diff("golden/rewards@1", "golden/rewards@3", store)
    changed = capsys.readouterr().out
    assert f" → {short}\n" in changed and not re.search("[0-9a-f]{64}", changed)
    rows = in_json(versions.ls, "golden", store=store, columns=key)["versions"]
    assert {key: whole} in [row["columns"] for row in rows]


def test_rm_names_a_few_of_many_versions_that_were_made_of_it(tmp_path, capsys, in_json):
    store = Store(tmp_path / "store")
    prompts = make_prompts(store, 1)
    for _ in range(2):
        rollouts = write_rollouts(store, prompts, rollouts_table(4, 4, 4))
    for _ in range(8):
        make_rewards(store, rollouts)
    versions.rm(str(rollouts.ref), store=store.url)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bench/rollouts@2 is deleted" and len(lines) == 7
    assert lines[1] == "bench/rewards@1 was made of it"
    assert lines[-1] == "and 3 more; in all rewards 8 (--json names each)"
    versions.rm("bench/rewards@1", store=store.url)
    assert capsys.readouterr().out == "bench/rewards@1 is deleted\n"
    users = in_json(versions.rm, "bench/prompts@1", store=store.url)["users"]
    assert users == ["bench/rollouts@1"]


def test_ls_has_no_keys_of_a_manifest_that_was_lost_since_it_was_read(noted, tmp_path, in_json):
    path = shutil.copytree(noted.url, tmp_path / "store")
    in_json(versions.ls, store=str(path))
    (path / "bench/rewards/v000002/manifest.json").unlink()
    answer = in_json(versions.ls, store=str(path), columns="functions.0.use")["versions"]
    assert [row["columns"] for row in answer if "rewards" in row["ref"]] == [
        {"functions.0.use": "repetition"},
        {},
    ]
