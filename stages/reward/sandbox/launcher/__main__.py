"""The entry: `python -I -S launcher REPORT LIFELINE`. The rest is in modules, whose bytecode Python
keeps."""

import sys

import start

start.main(int(sys.argv[1]), int(sys.argv[2]))
