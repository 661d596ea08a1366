"""Run by test_several_hosts.py on each rank: what a stage's process does, with less patience.

python -m tests.stages.optimize.host_checks CALL
"""

import json
import logging
import sys
from dataclasses import asdict
from datetime import timedelta

from quiver.stages.__main__ import answer_to, leave
from quiver.stages.core.run.runner import Call, find_or_make
from quiver.stages.optimize import accelerator

logging.basicConfig(level=logging.INFO)
store, config, refs, into = json.loads(sys.argv[1])
accelerator.HOST_SILENCE = timedelta(seconds=15)
try:
    answer = asdict(find_or_make(Call("optimize", config, store, refs, into)))
    code = 0
except Exception as error:
    answer, code = answer_to(error, "optimize")
print(json.dumps(answer))
leave(code)
