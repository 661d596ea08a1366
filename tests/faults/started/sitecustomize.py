"""Runs at the start of each interpreter with this folder on its PYTHONPATH, and in the forks that
stand in for such interpreters (`tests/warm`): lets the process fail as its environment says."""

import os
import runpy
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))

for folder in sys.path if __name__ == "sitecustomize" else ():
    other = os.path.join(folder, "sitecustomize.py")
    if os.path.abspath(folder) != _HERE and os.path.exists(other):
        runpy.run_path(other)  # the one that this one hides
        break

if "QUIVER_TEST_FAIL" in os.environ:
    sys.path.insert(0, _ROOT)
    from tests.faults import failing

    failing.start()
    sys.path.remove(_ROOT)
