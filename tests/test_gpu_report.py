"""The report of a first quarter of an hour on a GPU: parts that crash or hang, an installation that is
not there, wheels in pieces; and all of it on a CPU."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks import gpu_report, pieces

ROOT = Path(__file__).parents[1]


def test_a_part_that_crashes_or_hangs_ends_with_what_it_started_and_the_next_begins(tmp_path):
    mark = tmp_path / "child"
    child = f"import pathlib, time; time.sleep(4); pathlib.Path({str(mark)!r}).touch()"
    started = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    programs = {
        "crashes": "import os; print('before', flush=True); os.abort()",
        "hangs": f"{started}\nprint('started', flush=True)\nimport time; time.sleep(60)",
        "works": "print('after')",
        "late": "print('never')",
    }
    commands = {name: [sys.executable, "-S", "-c", code] for name, code in programs.items()}
    limits = {"crashes": 20.0, "hangs": 2.0, "works": 20.0, "late": 0.0}
    failed = gpu_report.run_parts(commands, limits, tmp_path / "out", 60, {})
    assert failed == ["crashes", "hangs", "late"]
    report = (tmp_path / "out/report.md").read_text()
    ends = dict(re.findall(r"## (\w+): (.*) after", report))
    assert ends["crashes"] == "ended with -6" and ends["hangs"] == "ended by its limit of 2 s"
    assert ends["works"] == "ended with 0"
    assert "before\n" in report and "started\n" in report and "after\n" in report
    assert (tmp_path / "out/hangs.txt").read_text() == "started\n"
    time.sleep(4)
    assert not mark.exists(), "a process of the part lives on"


def test_no_part_begins_when_the_time_is_spent(tmp_path):
    commands = {"first": [sys.executable, "-S", "-c", "print(1)"]}
    assert gpu_report.run_parts(commands, {"first": 60.0}, tmp_path, 5.0, {}) == ["first"]
    assert "first: not begun" in (tmp_path / "report.md").read_text()


def test_quiver_is_imported_where_it_is_not_installed(tmp_path):
    site, root = gpu_report.make_site(tmp_path / "site", is_needed=True)
    code = (
        f"import sys; sys.path[:0] = [{site!r}, {root!r}]\n"
        "import quiver, quiver.schemas.errors\n"
        "from importlib import metadata\n"
        "print(quiver.__file__, metadata.version('quiver-rl'))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout.split() == [f"{site}/quiver/__init__.py", "0.1.0"]


def test_attention_of_an_older_torch_takes_the_newer_ones_arguments(tmp_path):
    """In place of torch a module of the same name, whose function knows no `enable_gqa`."""
    folder = tmp_path / "torch/nn/attention"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parents[1]):
        (package / "__init__.py").touch()
    (folder / "varlen.py").write_text("def varlen_attn(q, *, scale=1):\n    return q * scale\n")
    (tmp_path / "sitecustomize.py").write_text(gpu_report.VARLEN)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sitecustomize\n"
    code += "from torch.nn.attention.varlen import varlen_attn\n"
    code += "print(varlen_attn(3, scale=2, enable_gqa=True))"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={})
    assert done.stdout == "6\n"


def test_the_gpus_waiting_is_told_by_where_it_is(capsys):
    """Two kernels at once, one after 100 µs, one after 2 ms."""
    gpu_report.print_gaps([(0, 1000), (200, 900), (1100, 1500), (3500, 4000)])
    said = capsys.readouterr().out
    assert "4 kernels, busy 1.9 ms of 4.0" in said
    assert "idle in 2 gaps, of them 1 of at least 0.5 ms" in said
    assert "2.0 ms at 1.5 ms" in said


def test_wheels_come_back_from_their_pieces(tmp_path):
    source, folder, target = (tmp_path / name for name in ("wheels", "pieces", "back"))
    source.mkdir()
    contents = {"a.whl": bytes(range(256)) * 500, "b.whl": b"b", "c.whl": b""}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    hashes = pieces.split(source, folder, 50_000)
    sizes = [path.stat().st_size for path in sorted(folder.glob("0*"))]
    assert len(sizes) == len(hashes) > 2 and set(sizes[:-1]) == {50_000}
    assert pieces.join(folder, target) == sorted(contents)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == contents
    (folder / "001").write_bytes(b"damaged")
    (folder / "002").unlink()
    with pytest.raises(SystemExit, match=r"pieces of .*: 001, 002$"):
        pieces.join(folder, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.prefect
def test_the_whole_report_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks.gpu_report", "--quick", "--minutes", "60"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (tmp_path / "report.md").read_text()
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [*gpu_report.PARTS]
    assert "product of 256³ in torch.bfloat16" in (tmp_path / "facts.txt").read_text()
    assert "self_cpu_time_total" in (tmp_path / "profile.txt").read_text()
    assert '"tokens_per_second"' in (tmp_path / "steps.txt").read_text()
    assert (tmp_path / "run.txt").read_text().count("'optimize'") == 2
