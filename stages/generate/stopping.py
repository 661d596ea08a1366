"""Stop strings: which sampled id completes one of `sampling.stop`, so that every engine ends a row
at the same id.

A row's text grows id by id, decoded after its prompt as vLLM decodes it, with the text of every
token, special ones too; a string counts only where the newest id completes it. Ids stay whole: the
last one may bring more text than the string's end.

    stops = StopStrings(tokenizer, sampling, prompt_ids)
    stops.add(id)       # the string that this id completes, or None
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from .options import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class StopStrings:
    """The text of one row, as far as it can hold the beginning of a stop string."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, sampling: Sampling, prompt_ids: Sequence[int] = ()
    ) -> None:
        """`prompt_ids`: what the completion's text follows; none for an encoder's prompt."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=False)
        self._stop = sampling.stop
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._text = ""

    def add(self, token: int) -> str | None:
        """The stop string that `token`, the row's next id, completes; of several the one that ends
        first. None where it completes none, or stands before `min_tokens`."""
        self._num_tokens += 1
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception as error:  # the library has no class of its own
            if "Invalid prefix" not in str(error):
                raise
            # what was decoded before was no prefix of what it is now: vLLM begins anew here too
            self._stream = DecodeStream(skip_special_tokens=False)
            piece = self._stream.step(self._tokenizer, token)
        if not piece:  # the first bytes of a character
            return None
        before = len(self._text)
        self._text += piece
        ends = {}
        for string in self._stop:
            start = self._text.find(string, max(before - len(string) + 1, 0))
            if start >= 0:
                ends[string] = start + len(string)
        longest = max(map(len, self._stop))
        self._text = self._text[-longest:]
        if not ends or self._num_tokens <= self._min_tokens:
            return None
        return min(ends, key=ends.get)
