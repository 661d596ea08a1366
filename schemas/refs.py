"""References: `run/kind@version`, the only thing that travels between tasks.

A version is a number, `latest`, or a tag. Inside a recipe the run may be left out: `policy@3`.
Names are checked only here, so that no name can lead out of the store's folder.

>>> parse("arith/rollouts@3")
Ref(run='arith', kind='rollouts', version=3)
>>> str(parse("policy@latest", run="arith"))
'arith/policy@latest'

Not of the spine: the form of a reference explains itself, `run/kind@version`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import ConfigError, did_you_mean, printable

KINDS = (
    "prompts",
    "rollouts",
    "rewards",
    "logprobs",
    "advantages",
    "updates",
    "evaluations",
    "policy",
)
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NUMBER = re.compile(r"[0-9]{1,12}")
"""The number of a version."""


def check_name(name: str, what: str = "name") -> str:
    """Return `name` if it may name a run or a tag. Raises ConfigError otherwise."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{what} {printable(repr(name))}",
            "a name is 1 to 64 of a-z 0-9 . _ -, starts with a letter or digit, and has no '..'",
            next=f"choose another {what}",
        )
    if name.startswith("store.json") or name.endswith(".tmp"):
        problem = "is a name that the store uses for itself"
        raise ConfigError(f"{what} {name}", problem, next=f"choose another {what}")
    return name


class Ref(NamedTuple):
    """One version of one kind in one run. `version` is an int once it is resolved."""

    run: str
    kind: str
    version: int | str

    def __str__(self) -> str:
        return f"{self.run}/{self.kind}@{self.version}"

    @property
    def folder(self) -> str:
        """The version's folder below the store: `arith/rollouts/v000003`."""
        return f"{self.run}/{self.kind}/{version_name(self.version)}"


def version_name(number: int) -> str:
    """Return the name of a version's folder: `v000003`."""
    return f"v{number:06d}"


def parse(text: str | Ref, run: str | None = None) -> Ref:
    """Parse `run/kind@version`, or `kind@version` if `run` is given.

    Raises ConfigError that says what is wrong.
    """
    if isinstance(text, Ref):
        return text
    if isinstance(text, list | tuple):
        raise ConfigError(
            f"references {printable(repr(text))}",
            f"expected one version, got a list of {len(text)}",
            next="name one version, outside of a list",
        )
    head, at, version = str(text).rpartition("@")
    own_run, slash, kind = head.rpartition("/")
    name = own_run if slash else run
    number = _NUMBER.fullmatch(version)
    if not at or not version or kind not in KINDS or not name:
        raise ConfigError(
            f"reference {printable(repr(text))}",
            f"expected run/kind@version with kind one of {', '.join(KINDS)}"
            f"{'' if kind in KINDS else did_you_mean(kind, KINDS)}",
            next="quiver ls",
        )
    check_name(name, "run")
    if version.removeprefix("-").isdecimal() and not number:
        raise ConfigError(
            f"reference {printable(repr(text))}",
            "a version is a number of 1 to 12 digits, latest or a tag",
            next="quiver ls",
        )
    if number:
        return Ref(name, kind, int(version))
    return Ref(name, kind, check_name(version, "tag"))


def as_version(text: str) -> Ref | None:
    """Parse a source named in a manifest; None for a hub's id or a folder.

    >>> as_version("arith/policy@3").version, as_version("somebody/reward-model")
    (3, None)
    """
    try:
        ref = parse(text)
    except ConfigError:
        return None
    return ref if isinstance(ref.version, int) else None
