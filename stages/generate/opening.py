"""Prepare a plan's episodes: the environments, the chat template, and each prompt's beginning.

    config = with_code_hashes(config, prompts)         # at planning; runs no user code
    with request_maker(plan, writer, setup) as new_requests:
        requests = new_requests(rows=rows, …)

Without [generate.turns] no environment is opened, and `new_requests` is `Requests`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import parse
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Version
from quiver.stages.core.store.writer import Writer
from quiver.stages.generate.config import Config
from quiver.stages.generate.engine import Setup
from quiver.stages.generate.requests import Requests
from quiver.stages.generate.rows import Rows
from quiver.stages.generate.texts import Texts
from quiver.stages.model import checkpoints
from quiver.stages.model.chat.control_tokens import Guard
from quiver.stages.model.chat.generation_prompt import learn_markup, reserved_ids
from quiver.stages.model.chat.messages import read_messages
from quiver.stages.model.chat.template import Template, first_variables
from quiver.stages.model.media.checking import FileCheck, MediaLimits
from quiver.stages.model.media.processor import load_processor
from quiver.stages.turns.bridge import Bridge
from quiver.stages.turns.environment_config import EnvironmentConfig
from quiver.stages.turns.episode import Setting
from quiver.stages.turns.pool import EnvironmentPool, Loaded
from quiver.stages.turns.saved import beginning_of
from quiver.stages.turns.tool_calls import make_parser

from .episodes import Episodes


def with_code_hashes(config: Config, prompts: Version) -> Config:
    """Add the hashes of the code that [generate.turns] names.

    Raises ConfigError if `prompts` were rendered for another environment.
    """
    if config.turns is None:
        return config
    turns = config.turns.with_fingerprint()
    saved = prompts.manifest.config.get("turns")
    is_same = False
    if saved is not None:
        environment = parse(EnvironmentConfig, saved, f"{prompts.ref} config.turns")
        is_same = environment.key() == turns.alone().key()
    if not is_same:
        how = "without [generate.turns]" if saved is None else "for another environment"
        raise ConfigError(
            str(prompts.ref),
            f"its prompts were rendered {how}, and prompts show an environment's opening and tools",
            next="quiver prompt RECIPE",
        )
    return config.model_copy(update={"turns": turns})


@contextmanager
def request_maker(plan: Plan, writer: Writer, setup: Setup) -> Iterator[Callable[..., Requests]]:
    """Yield a function that makes a stage's requests, while environments and template are open.

    Raises ConfigError or ResourceError.
    """
    turns = plan.config.turns
    if turns is None:
        yield Requests
        return
    if checkpoints.is_encoder_decoder(setup.policy):
        raise ConfigError(
            "generate.turns",
            f"{setup.policy.ref} is an encoder-decoder model, which reads no turns",
            next="take a decoder-only model",
        )
    prompts = plan.inputs["prompts"]
    tokenizer = checkpoints.load_tokenizer(setup.policy)
    rendering = prompts.manifest.config
    variables = first_variables(tokenizer, rendering["template_arguments"])
    source = prompts.manifest.metrics["chat_template"]
    processor = load_processor(setup.policy, *turns.most_media) if turns.most_media else None
    named = {name: rendering[name] for name in MediaLimits.model_fields if name in rendering}
    limits = parse(MediaLimits, named, f"{prompts.ref} config")
    most_seconds = processor.most_seconds if processor else math.inf
    # Other ids of sampling.stop_token_ids end a turn as stop strings do: within its text.
    end_ids: list[int] = []
    with suppress(ConfigError):  # the model names no end token
        end_ids = checkpoints.end_token_ids(setup.policy)
    with (
        EnvironmentPool(turns) as pool,
        Template(source, variables, rendering["template_seconds"]) as template,
        closing(FileCheck(limits.by_modality(most_seconds))) as check,
    ):
        _require_same_tools(prompts, pool.loaded)
        markup = learn_markup(tokenizer, [template.probe], reserved_ids(setup.policy))
        guard = Guard(tokenizer, **markup._asdict())
        bridge = Bridge(
            template,
            guard,
            end_token=guard.decode(end_ids[:1]),
            tool_role=turns.tool_role,
            tools=pool.loaded.tools,
            processor=processor,
        )
        histories = bridge.require(turns.rewritten)
        for modality in turns.most_media:
            bridge.require_shown(modality)
        writer.report_fields["template"] = [history._asdict() for history in histories]
        parse_turn = None
        if pool.loaded.tools:
            parse_turn = make_parser(
                turns.parser, tokenizer, prefix=bridge.opening, tools=pool.loaded.tools
            )
        setting = Setting(
            limits=turns,
            bridge=bridge,
            parse=parse_turn,
            decode=Texts.of(setup.policy, setup.stop_ids).decode,
            stop_ids=frozenset({*end_ids, bridge.end_id} - {None}),
            max_turn_tokens=setup.sampling.max_tokens,
            context=setup.max_model_len,
            answers=pool.loaded.answers,
            check_file=check.require,
            histories=histories,
        )

        def new_requests(rows: Rows, **arguments: Any) -> Episodes:
            prompts = rows.prompts.select(["group_id", "columns", "messages"]).to_pylist()
            return Episodes(
                rows=rows,
                setting=setting,
                pool=pool,
                beginnings=[beginning_of(row["group_id"], row["columns"]) for row in prompts],
                chats=[read_messages(row["messages"]) for row in prompts],
                **arguments,
            )

        yield new_requests


def _require_same_tools(prompts: Version, loaded: Loaded) -> None:
    """Raise ConfigError unless the prompts show the current tools."""
    shown = prompts.table(["tools"])["tools"][0].as_py()
    if (json.loads(shown) if shown else []) != loaded.tools:
        raise ConfigError(
            str(prompts.ref),
            "its prompts show other tools to the policy than generate.turns has now",
            next="quiver prompt RECIPE --force",
        )
