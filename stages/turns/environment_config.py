"""Configuration of an environment: [generate.turns] without the limits of an episode."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field, model_validator

from quiver.schemas.errors import did_you_mean, printable
from quiver.stages.core import plugins
from quiver.stages.core.config import Config, Runtime, without_folder

_HERE = "quiver.stages.turns"
ENVIRONMENTS = {
    "gymnasium": f"{_HERE}.adapters:open_gymnasium",
    "openenv": f"{_HERE}.servers:open_openenv",
}
"""Environments by the word before the colon: a registered text environment of gymnasium's, by its
name, and a server that speaks OpenEnv, by its URL. Each opens as
`function(text after the colon, arguments) -> Factory`."""
TOOLS = {"python": f"{_HERE}.adapters:open_python", "mcp": f"{_HERE}.servers:open_mcp"}
"""Tools likewise: programs in the sandbox, and the tools of an MCP server, by the command that
starts it. Each opens as `function(text after the colon) -> functions`."""


class OwnCode(NamedTuple):
    """Code of the user that a recipe names."""

    source: str
    field: str
    """Config key that names it."""
    kind_name: str
    """The word for it in messages: class or function."""

    def fingerprint(self) -> str:
        """Return the hash of its file, without running it. Raises ConfigError."""
        return plugins.fingerprint(plugins.locate(*self))


class EnvironmentConfig(Config):
    """The environment or tools that answer the policy, and time limits of the answers."""

    environment: str = ""
    """A class of yours, `my_env.py:Guess`, with a method `step` or with public methods as tools; or
    `gymnasium:NAME`, or `openenv:URL`. If empty, `tools` are used."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call: a function of yours, `my_tools.py:search`; the sandbox,
    `python`; or the tools of an MCP server, `mcp:` and the command that starts it."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""
    step_seconds: Runtime[float] = Field(default=60.0, gt=0)
    """Time limit of one answer of the environment."""
    episode_seconds: Runtime[float] = Field(default=600.0, gt=0)
    """Time limit of all its answers in one episode; the policy's own time does not count."""
    processes: Runtime[int | None] = Field(default=None, ge=1)
    """Processes, each with many environments. Default: one per core."""
    max_memory_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Limit of a process's private memory. Default: its share of the machine's memory."""
    fingerprint: str = ""
    """Hash of your code, filled in by the stage."""

    @model_validator(mode="after")
    def _names_one(self) -> EnvironmentConfig:
        if bool(self.environment) == bool(self.tools):
            raise ValueError("name an environment or tools, one of the two")
        if self.tools and self.arguments:
            raise ValueError("arguments belong to an environment; tools take none")
        entries = ENVIRONMENTS if self.environment else TOOLS
        for source in self.sources:
            before, _, behind = source.partition(":")
            if source == "python" and self.tools:
                continue
            if not behind or before == "python":
                names = ", ".join(name if name == "python" else f"{name}:…" for name in entries)
                raise ValueError(
                    f"{printable(repr(source))} is not known, expected file.py:name, module:name, "
                    f"or one of {names}{did_you_mean(before, entries)}"
                )
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The environment, or the tools, as named in the recipe."""
        return (self.environment,) if self.environment else self.tools

    def own_code(self) -> list[OwnCode]:
        """Return the user's own code that this configuration names."""
        entries, field = (ENVIRONMENTS, "environment") if self.environment else (TOOLS, "tools")
        kind_name = "class" if self.environment else "function"
        return [
            OwnCode(source, f"generate.turns.{field}", kind_name)
            for source in self.sources
            if source.partition(":")[0] not in entries
        ]

    def with_fingerprint(self) -> EnvironmentConfig:
        """Return a copy with the hash of the named code, which is not run. Raises ConfigError."""
        hashes = dict.fromkeys(code.fingerprint() for code in EnvironmentConfig.own_code(self))
        return self.model_copy(update={"fingerprint": "".join(hashes)})

    def alone(self) -> EnvironmentConfig:
        """Return a copy with these fields only, without those that a stage's subclass adds."""
        names = EnvironmentConfig.model_fields
        return EnvironmentConfig(**{name: getattr(self, name) for name in names})

    def key(self) -> dict[str, Any]:
        """Return the fields of the run key. Once the fingerprint is known, folders do not count."""
        fields = super().key()
        if self.fingerprint:
            # only names of code have a folder: a URL or a command stays whole
            own = [code.source for code in EnvironmentConfig.own_code(self)]
            names = [without_folder(name) if name in own else name for name in self.sources]
            if self.environment:
                (fields["environment"],) = names
            else:
                fields["tools"] = names
        return fields
