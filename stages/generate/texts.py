"""Decode sampled ids into the text that the policy wrote: completions, turns and imported lines.

Every token is kept, special ones too. The only exceptions are tokens that frame a text without
being part of it: end tokens, padding, and the beginning of a sequence.

    texts = Texts.of(policy, stop_ids)
    texts.decode([320, 86, 321, 2])      # "<think>three</think>", 2 ends the completion
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tokenizers import decoders

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_JOINING = (type(None), decoders.WordPiece, decoders.BPEDecoder)
"""Decoders that insert the spaces between words themselves, so no token contains one."""


class Texts:
    """The decoder of one policy's completions."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        end_ids: Collection[int],
        stop_ids: Collection[int] = (),
        *,
        begins_text: bool = False,
    ) -> None:
        """Prepare the tokenizer.

        Args:
            tokenizer: The policy's.
            end_ids: The model's end tokens; the tokenizer may know fewer.
            stop_ids: All ids that stop sampling, the recipe's included.
            begins_text: True if a completion follows no prompt, as in an encoder-decoder model.
        """
        framing = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        self._framing = {*end_ids, *framing}
        self._left_out = {*stop_ids, *self._framing}
        # transformers' own `decode` may remove spaces (clean_up_tokenization_spaces).
        self._tokenizer = tokenizer.backend_tokenizer
        # Many decoders drop a text's leading space, so put a letter before it.
        self._lead: list[int] = []
        if not begins_text and not isinstance(self._tokenizer.decoder, _JOINING):
            self._lead = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._lead_text = self._decoded([self._lead])[0]

    @classmethod
    def of(cls, policy: Version, stop_ids: Collection[int] = ()) -> Texts:
        """Return the decoder for completions of `policy` that end at `stop_ids`. Raises
        ConfigError."""
        end_ids: list[int] = []
        # The model names no end token.
        with suppress(ConfigError):
            end_ids = checkpoints.end_token_ids(policy)
        return cls(
            checkpoints.load_tokenizer(policy),
            end_ids,
            stop_ids,
            begins_text=checkpoints.is_encoder_decoder(policy),
        )

    def lost_text(self, stop_id: int) -> str:
        """Return the text of a stop id that is left out although it does not frame this model's
        texts; else ""."""
        return "" if stop_id in self._framing else self._decoded([[stop_id]])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that the policy wrote with these ids."""
        return self.decode_all([ids])[0]

    def decode_all(self, rows: Iterable[Iterable[int]]) -> list[str]:
        """Decode many completions at once."""
        written = [[int(id) for id in ids if id not in self._left_out] for ids in rows]
        texts = self._decoded([[*self._lead, *ids] for ids in written])
        return [text.removeprefix(self._lead_text) for text in texts]

    def _decoded(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return self._tokenizer.decode_batch(rows, skip_special_tokens=False)
