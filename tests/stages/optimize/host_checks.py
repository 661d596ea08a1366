"""Run by test_several_hosts.py on each rank: what a stage's process does, with less patience.

python -m tests.stages.optimize.host_checks CALL
"""

import json
import logging
import sys
from datetime import timedelta

from quiver.stages.__main__ import answer_call, leave
from quiver.stages.core.run.runner import Call
from quiver.stages.optimize import accelerator

logging.basicConfig(level=logging.INFO)
store, config, refs, into = json.loads(sys.argv[1])
accelerator.HOST_SILENCE = timedelta(seconds=15)
answer, code = answer_call(Call("optimize", config, store, refs, into).to_json())
print(json.dumps(answer))
leave(code)
