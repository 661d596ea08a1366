"""Configs: unknown keys name the nearest, wrong values say what is allowed, runtime knobs stay out
of the key."""

import tomllib
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import Config, Runtime, parse


class Inner(Config):
    temperature: float = Field(1.0, ge=0)
    """Unit: none."""
    threads: Runtime[int] = 2
    """A knob."""


class Outer(Config):
    engine: Literal["vllm", "scripted"] = "vllm"
    """Which."""
    sampling: Inner = Inner()
    """How."""
    others: tuple[Inner, ...] = ()
    """More of them."""
    range: tuple[int, int] = (0, 1)
    """Plain values."""
    limits: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """By name."""
    free: dict[str, Any] = Field(default_factory=dict)
    """Anything."""
    rate: float | None = None
    """May be none."""
    flag: bool | int = False
    """A switch, or a number."""
    shards: Runtime[int] = 8
    """A knob."""


def test_runtime_knobs_are_not_in_the_key():
    plain = {"engine": "vllm", "sampling": {"temperature": 1.0}, "others": [], "range": [0, 1]}
    plain |= {"limits": {}, "free": {}, "rate": None, "flag": False}
    assert Outer().key() == plain
    assert Outer(shards=1, sampling=Inner(threads=9)).key() == plain
    others = Outer(others=[Inner(threads=9), Inner(temperature=2)]).key()["others"]
    assert others == [{"temperature": 1.0}, {"temperature": 2.0}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"engin": "vllm"}, "unknown key engin; did you mean engine?"),
        (
            {"sampling": {"temprature": 1}},
            "unknown key sampling.temprature; did you mean temperature?",
        ),
        (
            {"sampling": {"temperature": -1}},
            "sampling.temperature: Input should be greater than or equal to 0, got -1",
        ),
        ({"engine": "x"}, "engine: Input should be 'vllm' or 'scripted', got 'x'"),
        ({"shards": "many"}, "shards: Input should be a valid integer"),
        (
            {"sampling": {"temperature": float("nan")}},
            "sampling.temperature is not a finite number",
        ),
        *(
            ({"free": {"days": [value]}}, "free.days.0 is a date or time: write it in quotes")
            for value in tomllib.loads(
                "v = [2026-11-20, 10:00:00, 2026-11-20T10:00:00, 2026-11-20T10:00:00Z]"
            )["v"]
        ),
    ],
)
def test_what_is_wrong_is_said(data, said):
    with pytest.raises(ConfigError) as caught:
        parse(Outer, data, "recipe x.toml")
    assert said in caught.value.message
    assert (caught.value.object, caught.value.exit_code) == ("recipe x.toml", 2)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"shards": True}, "shards"),
        ({"rate": False}, "rate"),
        ({"sampling": {"temperature": True}}, "sampling.temperature"),
        ({"others": [{}, {"threads": True}]}, "others.1.threads"),
        ({"range": [0, True]}, "range.1"),
        ({"limits": {"a": 1, "b": True}}, "limits.b"),
    ],
)
def test_true_is_no_number(data, place):
    with pytest.raises(ConfigError) as caught:
        parse(Outer, data, "recipe x.toml")
    value = "False" if place == "rate" else "True"
    assert caught.value.message == f"{place}: a number is expected, got {value}"


def test_true_is_true_where_it_may_be():
    assert Outer(flag=True).flag is True and Outer(flag=7).flag == 7


def test_a_config_can_not_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Outer().engine = "scripted"
