"""The section `[[reward.functions]]` of a recipe: one reward function and how it is called."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from quiver.stages.core import plugins
from quiver.stages.core.config import Runtime, without_folder
from quiver.stages.core.from_cell import as_file
from quiver.stages.core.servers import refuse_token, refuse_url
from quiver.stages.reward.functions import shipped
from quiver.stages.reward.scoring import ScorerConfig


class FunctionConfig(ScorerConfig):
    """One reward function."""

    model_config = ConfigDict(hide_input_in_errors=True)

    use: str = Field(min_length=1)
    """A function that comes with Quiver (`quiver rewards`), `module:function`, or
    `file.py:function` seen from the working directory."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for every call. They take precedence over columns of the same name."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column for each parameter that has another name: `{ answer = "solution" }`.
    `reward_model.ground_truth` is the field of a column, whose cells are objects or JSON text of
    them; a cell without the field gives null. Parameters left out take the column of their own
    name."""
    completions: Literal["text", "messages"] = "text"
    """Form of a completion: its text, or a chat of one message, as TRL gives it: `[{"role":
    "assistant", "content": text}]`."""
    style: Literal["quiver", "verl"] = "quiver"
    """`verl`: one row per call, with the parameters data_source, solution_str, ground_truth and
    extra_info of rows in verl's layout. It returns the number, or a mapping with it under
    `score`."""
    scope: Literal["row", "group"] = "row"
    """`group`: each call holds one whole group, the rollouts of one prompt in the order of their
    `sample_index`, and nothing else. A failed call fails for all of its rows. The group has every
    row of the rollouts, including failed episodes (see `end_reason`) and, in a retry, rows whose
    rewards are taken over. A group that lies in two shards is called for each of them."""
    timeout_seconds: Runtime[float] = Field(default=30.0, gt=0)
    """Longest time for one row, in seconds; a row that takes longer has failed. With scope `group`:
    for one group."""
    concurrency: Runtime[int] = Field(default=64, ge=1)
    """Rows of an async function that wait together. Other functions: see `reward.workers`."""

    @property
    def is_shipped(self) -> bool:
        """True if it comes with Quiver and is not the user's code."""
        return ":" not in self.use

    @model_validator(mode="before")
    @classmethod
    def _nothing_secret(cls, section: Any) -> Any:
        """Refuse written secrets and style errors, put a Python function into a file, and fill in
        the name. It runs on the whole section as its input, so that no message shows what was
        written."""
        if callable(section):
            section = {"use": section}
        if isinstance(section, dict) and callable(section.get("use")):
            section = {**section, "use": as_file(section["use"])}
        if not isinstance(section, dict) or not isinstance(section.get("use"), str):
            return section
        arguments = section.get("arguments")
        if section["use"] == "code" and isinstance(arguments, dict):
            token = arguments.get("sandbox_token")
            refuse_token(token, "sandbox_token")
            if arguments.get("sandbox_url"):
                refuse_url(arguments["sandbox_url"], needs_tls=bool(token))
        if ":" not in section["use"] and section.get("style", "quiver") != "quiver":
            raise ValueError(
                "style applies only to your own function, module:function or file.py:function"
            )
        if section.get("style") == "verl" and section.get("scope") == "group":
            raise ValueError("a function of style verl is given one row per call: leave scope out")
        return {**section, "name": section.get("name") or section["use"].rpartition(":")[2]}

    def key(self) -> dict[str, Any]:
        """Leave out the folder once the fingerprint is known: then the file's bytes decide."""
        if not self.fingerprint:
            return super().key()
        return {**super().key(), "use": without_folder(self.use)}


def fingerprint(config: FunctionConfig, *, remembered: bool = True) -> str:
    """Return the hash of a user's code, or the version of a shipped function with the hash of the
    model that it reads. No user code runs.

    Args:
        remembered: If true, a remembered hash of the model is enough.

    Raises ConfigError or SecurityError if the code is missing, or if a model that it names is not
    whole.
    """
    if config.is_shipped:
        return shipped(config.use).fingerprint(config.arguments, remembered=remembered)
    return f"sha256:{plugins.fingerprint(plugins.locate(config.use, 'reward.functions.use'))}"
