"""The entry: `python -I -S launcher REPORT LIFELINE`. The rest is in modules, whose bytecode Python
keeps."""

import os
import sys

sys.path.append(os.path.join(sys.path[0], "../../../common/runtime"))  # where `keeper` is

import start

start.main(int(sys.argv[1]), int(sys.argv[2]))
