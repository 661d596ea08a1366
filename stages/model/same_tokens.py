"""Whether an id is the same token to two models.

Tokenizers are loaded only if the hashes of their files differ.

    require_same_tokens(rollouts.manifest.model("policy"), store.open, policy, next="…")
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from quiver.schemas.errors import LineageError, printable
from quiver.schemas.manifest import ModelEntry
from quiver.stages.core.store import Version

from . import checkpoints


def require_same_tokens(
    model: ModelEntry,
    open: Callable[[str], Version],
    policy: Version,
    *,
    next: str,
    next_if_special: str = "",
    ignore_special: bool = False,
    among: Callable[[], Collection[int]] | None = None,
) -> None:
    """Raise LineageError unless each id is the same token to `model` and to `policy`.

    Args:
        model: The manifest entry of the other model.
        open: Opens its version, if its tokenizer's files are others.
        policy: The policy.
        next: Next step of the error.
        next_if_special: Next step if only special tokens differ. Default: `next`.
        ignore_special: Accept other special tokens.
        among: Returns the ids to compare, if the tokenizers differ. Default: all.
    """
    if model.tokenizer == checkpoints.model_entry("policy", policy).tokenizer:
        return
    tokenizers = [checkpoints.load_tokenizer(each) for each in (open(model.ref), policy)]
    differing = set.difference(*(set(tokenizer.get_vocab().items()) for tokenizer in tokenizers))
    special_ids = {
        id
        for tokenizer in tokenizers
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    if among is not None:
        compared = among()
        differing = {(token, id) for token, id in differing if id in compared}
    all_special = all(id in special_ids for _, id in differing)
    if ignore_special:
        differing = {(token, id) for token, id in differing if id not in special_ids}
    if not differing:
        return
    token, id = min(differing, key=lambda entry: entry[1])
    policy_token = tokenizers[1].convert_ids_to_tokens(id)
    raise LineageError(
        str(policy.ref),
        f"its tokenizer is another than {model.ref}'s: {len(differing)} "
        f"{'special ' if all_special else ''}ids are other tokens, such as {id}, expected "
        f"{printable(repr(token))}, found "
        f"{printable(repr(policy_token)) if policy_token else 'none'}",
        next=next_if_special if all_special and next_if_special else next,
    )
