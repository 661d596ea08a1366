"""The GPU's kernels on a CPU, by Triton's interpreter, as a plugin of pytest: `pytest -p
tests.interpreted_kernels TESTS`. It stands for the whole process, so nothing else imports this
module."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from quiver.stages.common.forward.gpu import choice

choice.DEVICES.add("cpu")
