"""Ranks on CPUs, as somebody's own launcher starts them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_ranks(script: Path, size: int, *arguments: str) -> None:
    """Run `script` as `size` ranks, and wait until all have ended well."""
    env = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
