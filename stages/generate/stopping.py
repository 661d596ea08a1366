"""Find the id that completes a stop string, so that every engine ends a row at the same id.

A row's text grows id by id. It is decoded after its prompt, as vLLM does, with the text of every
token, special ones too. A string counts only if the newest id completes it. Ids stay whole: the
last one may add text after the string's end.

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
    """The tail of one row's text, as long as a stop string can be."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, sampling: Sampling, prompt_ids: Sequence[int] = ()
    ) -> None:
        """Set up one row. `prompt_ids` come before the completion's text; empty for an encoder's
        prompt."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=False)
        self._stop = sampling.stop
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._text = ""

    def add(self, token: int) -> str | None:
        """Return the stop string that `token`, the row's next id, completes.

        If it completes several, return the one that ends first. Return None if it completes none or
        comes before `min_tokens`.
        """
        self._num_tokens += 1
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception as error:  # the library has no error class of its own
            if "Invalid prefix" not in str(error):
                raise
            # The text decoded earlier is no prefix of the new text: vLLM starts a new stream here
            # too.
            self._stream = DecodeStream(skip_special_tokens=False)
            piece = self._stream.step(self._tokenizer, token)
        if not piece:  # the id completes no character yet
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
