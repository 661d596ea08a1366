"""From rendered text to ids, so that what a user typed never becomes a control id.

A template's text and a user's text meet in one string, and a tokenizer finds its added tokens
anywhere in it. So each rendering is compared with one of neutral contents: the sequence of control
ids must be the same. Where it is (nearly always), the ids are the canonical ones. Where a content
would forge a token, marks are put inside the token's text, the template is rendered with them, and
a tokenizer that splits at the marks and drops them encodes the whole: the same text, in more
pieces, with the template's own tokens whole. Where even that gives other control ids, SecurityError
names the prompt.

Control ids are those of all added tokens, special or not. Left out are tokens of white space alone
(some tokenizers spell indentation with them), the id for "unknown" where the tokenizer needs it for
text that it can not spell, and ids that the caller lets stand for their text (`plain`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Regex, Tokenizer, pre_tokenizers

from quiver.schemas.errors import SecurityError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Render = Callable[[list[str]], str]
_MARKS = (
    *range(0xE000, 0xF8FF),
    *range(0x10300, 0x10320),
)  # private use; Old Italic for tokenizers that strip those
_RARE = "\U0010fffd 𐎠 𪛖 ᚠ 🜁"  # where none of these is spelled, "unknown" stands for them


class Rendering(NamedTuple):
    """What the model is asked: the text for people, the ids for the engine."""

    text: str
    ids: list[int]


class Guard:
    """A tokenizer that knows which ids are control ids, and how a sequence starts and ends."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        closes: bool = False,
        plain: Collection[int] = (),
    ) -> None:
        """`closes`: prompts end as the tokenizer's post-processor ends them (encoder-decoder models
        read whole sequences). `plain`: added tokens that any content may hold."""
        self._json = tokenizer.backend_tokenizer.to_str()
        self._encoder = self._clone()
        added = {
            id: token.content for id, token in self._encoder.get_added_tokens_decoder().items()
        }
        named = {
            id: text
            for id, text in added.items()
            if text.replace("▁", "").strip() and id not in plain
        }
        unknown = (
            set(self._encode(self._encoder, _RARE)) if tokenizer.unk_token_id is not None else set()
        )
        self._unknown = unknown & {tokenizer.unk_token_id}
        self.control = frozenset(named) - self._unknown
        texts = sorted(map(re.escape, named.values()), key=len, reverse=True)
        self._typed = re.compile(f"(?=({'|'.join(texts)}))" if texts else r"(?!)", re.DOTALL)
        self._start, end = self._frame()
        self._end = end if closes else []
        self._neutral: dict[tuple, list[int]] = {}

    def encode(
        self, name: str, roles: tuple[str, ...], contents: list[str], render: Render
    ) -> Rendering:
        """`render(contents)` as ids with the control ids of a neutral rendering, no others.
        SecurityError names the prompt."""
        expected = self._expected(roles, contents, render)
        text = render(contents)
        ids = self._encode(self._encoder, text)
        typed = any(self._typed.search(content) for content in contents)
        if self.controls(ids) != expected or (typed and self._unknown):
            marks = self._choose_marks([text, *contents])
            ways = (self._mark_tokens, self._mark_all) if len(marks) == 2 else ()
            attempts = (self._attempt(contents, render, marks, put) for put in ways)
            found = next(
                (each for each in attempts if each and self.controls(each.ids) == expected), None
            )
            if found is None:
                raise SecurityError(
                    name,
                    "its text would become control tokens of the template, and no spelling was "
                    "found that would not",
                    next="take the row out of the source, or give prompt_ids",
                )
            text, ids = found
        return Rendering(text, self.framed(ids))

    def decode(self, ids: list[int]) -> str:
        """Ids as text, control tokens included."""
        return self._encoder.decode(ids, skip_special_tokens=False)

    def token_ends(self, text: str) -> list[int]:
        """Where in `text` its tokens end, rising."""
        return [end for _, end in self._encoder.encode(text, add_special_tokens=False).offsets]

    def controls(self, ids: list[int]) -> list[int]:
        """The control ids among `ids`, in order."""
        return [id for id in ids if id in self.control]

    def framed(self, ids: list[int]) -> list[int]:
        """`ids` with exactly one start (BOS) where the tokenizer puts one by itself, whether or not
        the template wrote it."""
        start, end = self._start, self._end
        while start and ids[: len(start)] == start:
            ids = ids[len(start) :]
        return start + ids + (end if ids[-len(end) :] != end else []) if end else start + ids

    # -- the neutral rendering

    def _expected(self, roles: tuple[str, ...], contents: list[str], render: Render) -> list[int]:
        neutral = ["x" if content.strip() else " " if content else "" for content in contents]
        key = (roles, *neutral)
        if key not in self._neutral:
            self._neutral[key] = self.controls(self._encode(self._encoder, render(neutral)))
        return self._neutral[key]

    # -- spelling what was typed

    def _attempt(
        self, contents: list[str], render: Render, marks: list[str], put: Callable
    ) -> Rendering | None:
        """The rendering with marks put into the contents; None where the template or the tokenizer
        does not carry them."""
        first, second = (
            render([put(content, mark) for content in contents]).replace(mark, "") for mark in marks
        )
        ids = self._encode(
            self._splitting(marks[0]), render([put(content, marks[0]) for content in contents])
        )
        canonical = self._encode(self._encoder, first)
        spelled = not self._unknown.isdisjoint(ids) or _bare(self.decode(ids)) == _bare(
            self.decode(canonical)
        )
        return Rendering(first, ids) if first == second and spelled else None

    def _mark_tokens(self, content: str, mark: str) -> str:
        """`content` with a mark after the first character of each added token's text in it."""
        cuts = [match.start() + 1 for match in self._typed.finditer(content)]
        return mark.join(
            content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)
        )

    def _mark_all(self, content: str, mark: str) -> str:
        """`content` with a mark between all characters and around them; white space at its ends
        stays outside."""
        core = content.strip()
        return content.replace(core, mark + mark.join(core) + mark, 1) if core else content

    def _choose_marks(self, texts: list[str]) -> list[str]:
        """Two characters that are in none of `texts` and that the tokenizer's normalizer leaves
        alone."""
        used, normalizer = set().union(*texts), self._encoder.normalizer
        free = (chr(code) for code in _MARKS if chr(code) not in used)

        def kept(mark: str) -> bool:
            normal = normalizer.normalize_str(f"a{mark}b") if normalizer else mark
            return mark in normal or self._seen(mark) in normal

        return list(islice(filter(kept, free), 2))

    # -- tokenizers

    def _clone(self) -> Tokenizer:
        made = Tokenizer.from_str(self._json)
        # a tokenizer.json may carry both, and a prompt is never cut in silence
        made.no_truncation()
        made.no_padding()
        return made

    def _seen(self, mark: str) -> str:
        """`mark` as a byte-level tokenizer's splitter sees it: each byte as a character; elsewhere
        as it is."""
        if '"ByteLevel"' not in self._json:
            return mark
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
            mark
        )[0][0]

    @lru_cache(maxsize=4)  # noqa: B019  a guard lives as long as its stage
    def _splitting(self, mark: str) -> Tokenizer:
        """The tokenizer, splitting at `mark` and dropping it. After its own pre-tokenizer: that may
        add a space to each text."""
        made = self._clone()
        split = pre_tokenizers.Split(Regex(re.escape(self._seen(mark))), behavior="removed")
        own = made.pre_tokenizer
        made.pre_tokenizer = pre_tokenizers.Sequence([own, split]) if own else split
        return made

    def _encode(self, encoder: Tokenizer, text: str) -> list[int]:
        return encoder.encode(text, add_special_tokens=False).ids

    def _frame(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text."""
        bare, framed = (
            self._encoder.encode("a", add_special_tokens=added).ids for added in (False, True)
        )
        starts = range(len(framed) - len(bare) + 1)
        at = next((i for i in starts if framed[i : i + len(bare)] == bare), 0)
        return framed[:at], framed[at + len(bare) :]


def _bare(text: str) -> str:
    """Without what tokenizers may change in any text: white space and case."""
    return "".join(text.split()).casefold()
