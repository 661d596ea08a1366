"""The golden trace: five steps of every algorithm give the loss and metrics that stand in
`tests/golden/trace.json`."""

import json

import pytest

from quiver.stages.optimize.algorithms import ALGORITHMS
from tests.golden import make_trace

GOLDEN = json.loads(make_trace.PATH.read_text())


def _compare(found: dict, expected: dict) -> None:
    assert found["metrics"] == {
        name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        for name, value in expected["metrics"].items()
    }
    assert len(found["steps"]) == len(expected["steps"]) == make_trace.STEPS
    for row, golden in zip(found["steps"], expected["steps"], strict=True):
        terms = {"loss": 1e-6}  # a sum of terms as large as 10, of which float32 knows no more
        assert row == {
            name: pytest.approx(value, rel=1e-6, abs=terms.get(name, 1e-7))
            for name, value in golden.items()
        }


def test_the_trace_is_of_every_algorithm():
    assert list(GOLDEN) == list(ALGORITHMS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_trace_is_reproduced(algorithm):
    _compare(make_trace.trace(algorithm), GOLDEN[algorithm])


def test_no_two_algorithms_have_one_trace():
    assert len({json.dumps(each) for each in GOLDEN.values()}) == len(GOLDEN)
