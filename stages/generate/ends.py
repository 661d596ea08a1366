"""Ids that end a completion, and warnings about end tokens that the model or the rewards miss.

Not of the spine: one set of ids and two warnings.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints
from quiver.stages.model.folder import end_ids_in

from .options import Sampling
from .texts import Texts

log = logging.getLogger(__name__)


def stop_ids_of(sampling: Sampling, policy: Version) -> tuple[int, ...]:
    """Return every id that ends a completion, ascending.

    End tokens outside the vocabulary are left out: they have no logit, so none is ever sampled.
    Raises ConfigError if the model names no other end token and `ignore_eos` is off.
    """
    stop_ids = {*sampling.stop_token_ids}
    if not sampling.ignore_eos:
        end_ids = checkpoints.end_token_ids(policy)
        vocabulary = checkpoints.vocabulary_size(policy)
        known = [id for id in end_ids if 0 <= id < vocabulary]
        if not known:
            raise ConfigError(
                str(policy.ref),
                f"its end tokens {end_ids} are outside the vocabulary, {vocabulary}",
                next="correct eos_token_id in the model's generation_config.json, or set "
                "ignore_eos = true in sampling",
            )
        stop_ids.update(known)
    return tuple(sorted(stop_ids))


def end_ids_of_generation_config(policy: Version) -> tuple[int, ...]:
    """Return the end token ids of generation_config.json if config.json has different ones; else
    ()."""
    with suppress(ConfigError):  # the model names no end token
        ids = checkpoints.end_token_ids(policy)
        config = checkpoints.model_config(policy)
        if ids != end_ids_in(config, "config.json", str(policy.ref)):
            return tuple(ids)
    return ()


def unknown_end(plan: Plan, policy: Version) -> dict[str, Any]:
    """Return `unknown_end` for the manifest, or {}.

    It holds `id` and `text` of the token with which the prompts' chat template ends an assistant's
    turn, if that token ends no completion.
    """
    end = _template_end(plan)
    sampling = plan.config.sampling
    if end is None or sampling.ignore_eos or end["id"] in stop_ids_of(sampling, policy):
        return {}
    is_stop = any(string in end["text"] for string in sampling.stop)
    return {} if is_stop else {"unknown_end": end}


def warn_of_ends(plan: Plan, policy: Version) -> None:
    """Warn if the template's end of turn or an end token of the model ends no completion, and about
    stop ids whose text rewards never see."""
    sampling = plan.config.sampling
    if not sampling.ignore_eos:
        lost = {*checkpoints.end_token_ids(policy)}.difference(stop_ids_of(sampling, policy))
        if lost:
            log.warning(
                "%s: its end tokens %s are outside the vocabulary and end no completion. Correct "
                "eos_token_id in the model's generation_config.json",
                policy.ref,
                sorted(lost),
            )
    end = unknown_end(plan, policy).get("unknown_end")
    if end is not None:
        log.warning(
            "%s: its chat template ends an assistant's turn with %s, but no completion ends there: "
            "the policy continues, mostly to max_tokens. Set generate.sampling.stop_token_ids = "
            "[%d], or add that id to eos_token_id in the model's generation_config.json",
            plan.inputs["prompts"].ref,
            printable(repr(end["text"])),
            end["id"],
        )
    stop_token_ids = sampling.stop_token_ids
    if not stop_token_ids:
        return
    template_end = _template_end(plan) or {}
    texts = Texts.of(policy)
    for id in stop_token_ids:
        text = texts.lost_text(id)
        if text and id != template_end.get("id"):
            log.warning(
                "generate.sampling.stop_token_ids: %d ends a completion, so its text %s is not "
                "part of completion_text, which rewards read; name the text in "
                "generate.sampling.stop to keep it",
                id,
                printable(repr(text)),
            )


def _template_end(plan: Plan) -> dict[str, Any] | None:
    return plan.inputs["prompts"].manifest.metrics.get("assistant_end")
