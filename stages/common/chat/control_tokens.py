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
text that it cannot spell, and ids that the caller lets stand for their text: those that may stand
`anywhere`, and in contents that are trusted (the recipe's and the policy's own) `trusted_only`.
Which ids these are, `generation_prompt.learn_markup` tells of a template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Regex, Tokenizer, pre_tokenizers

from quiver.schemas.errors import SecurityError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Render = Callable[[list[str]], str]
# private use; Old Italic for tokenizers that strip those
_MARKS = (*range(0xE000, 0xF8FF), *range(0x10300, 0x10320))
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
        anywhere: Collection[int] = (),
        trusted_only: Collection[int] = (),
    ) -> None:
        """`closes`: prompts end as the tokenizer's post-processor ends them (encoder-decoder models
        read whole sequences). `anywhere`: added tokens that any content may hold. `trusted_only`:
        more of them, which trusted contents may hold."""
        self._json = tokenizer.backend_tokenizer.to_str()
        self._encoder = self._new_encoder()
        self._unknown = {tokenizer.unk_token_id}.intersection(_ids(self._encoder, _RARE))
        added_tokens = {
            id: token.content
            for id, token in self._encoder.get_added_tokens_decoder().items()
            if token.content.replace("▁", "").strip() and id not in anywhere
        }
        self._control_ids = set(added_tokens) - self._unknown
        self._token = _matching(added_tokens.values())
        """Matches the first character of a control token's text, which is its group 1."""
        self._forbidden = _matching(
            text for id, text in added_tokens.items() if id not in trusted_only
        )
        """The same for tokens that no trusted content may hold."""
        texts = sorted((added_tokens[id] for id in trusted_only if id in added_tokens), key=len)
        self._markup = re.compile("|".join(map(re.escape, reversed(texts))) or r"(?!)")
        self._neutral_controls: dict[tuple, list[int]] = {}
        # what the post-processor puts before and after a text
        bare = _ids(self._encoder, "a")
        framed = self._encoder.encode("a").ids
        starts = range(len(framed) - len(bare) + 1)
        start = next((i for i in starts if framed[i : i + len(bare)] == bare), 0)
        self._start = framed[:start]
        self._end = framed[start + len(bare) :] if closes else []

    def encode(
        self,
        name: str,
        shape: tuple[str, ...],
        contents: list[str],
        render: Render,
        *,
        trusted: Collection[int] = (),
        is_whole: bool = True,
    ) -> Rendering:
        """`render(contents)` as ids with the control ids of a neutral rendering, no others.
        SecurityError names the prompt.

        Args:
            shape: What `render` puts round the contents: with the same shape, equal neutral
                contents are rendered equally.
            trusted: Which contents keep their markup.
            is_whole: As a sequence with its start and end; False: a piece of one, as it is.
        """
        frame = self.framed if is_whole else list
        # trusted contents without markup are treated as all others
        keeping = {n for n in trusted if self._markup.search(contents[n])}
        # equal contents stay equal and others differ, since templates may compare messages
        words = {content: f"x{n or ''}" for n, content in enumerate(dict.fromkeys(contents))}
        neutral = [
            self._neutral(content, words[content], n in keeping)
            for n, content in enumerate(contents)
        ]
        key = (shape, *neutral)
        if key not in self._neutral_controls:
            self._neutral_controls[key] = self._controls(_ids(self._encoder, render(neutral)))
        expected = self._neutral_controls[key]
        text = render(contents)
        ids = _ids(self._encoder, text)
        typed = any(
            (self._forbidden if n in keeping else self._token).search(content)
            for n, content in enumerate(contents)
        )
        if self._controls(ids) == expected and not (typed and self._unknown):
            return Rendering(text, frame(ids))
        for spelled in self._spellings(contents, render, text, keeping):
            if self._controls(spelled.ids) == expected:
                return Rendering(spelled.text, frame(spelled.ids))
        if keeping:  # its markup cannot be kept beside what has to be spelled
            return self.encode(name, shape, contents, render, is_whole=is_whole)
        raise SecurityError(
            name,
            "its text would become control tokens of the template, and no spelling was found that "
            "would not",
            next="take the row out of the source, or give prompt_ids",
        )

    def spelled_out(self, contents: list[str], trusted: Collection[int] = ()) -> list[str]:
        """The control tokens whose text stands in `contents`, and which `encode` spells out."""
        found = dict.fromkeys(
            match[1]
            for n, content in enumerate(contents)
            for match in (self._forbidden if n in trusted else self._token).finditer(content)
        )
        return list(found)

    def _neutral(self, content: str, word: str, keeps_markup: bool) -> str:
        """`word` in place of the words of a content; its markup stays if it may."""
        if not keeps_markup:
            return word if content.strip() else " " * bool(content)
        between = self._markup.split(content)
        words = [word if text.strip() else text for text in between]
        tags = [*self._markup.findall(content), ""]
        return "".join(word + tag for word, tag in zip(words, tags, strict=True))

    def missing_start(self, text: str) -> str:
        """The start (BOS) that the tokenizer puts before a text and `text` does not begin with;
        `encode` adds it. Empty if it has it, or there is none."""
        begins = _ids(self._encoder, text)[: len(self._start)] == self._start
        return "" if begins else self.decode(self._start)

    def decode(self, ids: list[int]) -> str:
        """Ids as text, control tokens included."""
        return self._encoder.decode(ids, skip_special_tokens=False)

    def first_control(self, text: str) -> int | None:
        """The control id that `text` begins with, where it does."""
        ids = _ids(self._encoder, text)
        return ids[0] if ids and ids[0] in self._control_ids else None

    def token_ends(self, text: str) -> list[int]:
        """Where in `text` its tokens end, rising."""
        return [end for _, end in self._encoder.encode(text, add_special_tokens=False).offsets]

    def framed(self, ids: list[int]) -> list[int]:
        """`ids` with exactly one start (BOS) where the tokenizer puts one by itself, whether or not
        the template wrote it, and with its end if the guard `closes`."""
        while self._start and ids[: len(self._start)] == self._start:
            ids = ids[len(self._start) :]
        if self._end and ids[-len(self._end) :] == self._end:
            return self._start + ids
        return self._start + ids + self._end

    def _controls(self, ids: list[int]) -> list[int]:
        """The control ids among `ids`, in order."""
        return [id for id in ids if id in self._control_ids]

    def _spellings(
        self, contents: list[str], render: Render, text: str, keeping: Collection[int]
    ) -> Iterator[Rendering]:
        """Renderings of `contents` with marks put into them, where template and tokenizer carry
        these: first behind the first character of each control token's text, then between all
        characters, but for the contents in `keeping`. `text` is the plain rendering."""
        used = set(text).union(*contents)
        normalizer = self._encoder.normalizer

        def is_free(mark: str) -> bool:
            """Whether no text holds it, and the tokenizer's normalizer leaves it alone."""
            if mark in used:
                return False
            normal = normalizer.normalize_str(f"a{mark}b") if normalizer else mark
            return mark in normal or self._as_split(mark) in normal

        def mark_tokens(n: int, mark: str) -> str:
            pattern = self._forbidden if n in keeping else self._token
            return pattern.sub(lambda match: match[0] + mark, contents[n])

        def mark_all(n: int, mark: str) -> str:
            if n in keeping:
                return mark_tokens(n, mark)
            content = contents[n]
            core = content.strip()  # white space at its ends stays outside
            return content.replace(core, mark + mark.join(core) + mark, 1) if core else content

        marks = list(islice(filter(is_free, map(chr, _MARKS)), 2))
        if len(marks) < 2:
            return
        for put_marks in (mark_tokens, mark_all):
            first, second = (
                render([put_marks(n, mark) for n in range(len(contents))]) for mark in marks
            )
            text = first.replace(marks[0], "")
            if text != second.replace(marks[1], ""):
                continue
            ids = _ids(self._splitter(marks[0]), first)
            canonical_ids = _ids(self._encoder, text)
            reads_the_same = _bare(self.decode(ids)) == _bare(self.decode(canonical_ids))
            if reads_the_same or not self._unknown.isdisjoint(ids):
                yield Rendering(text, ids)

    # -- tokenizers

    def _new_encoder(self) -> Tokenizer:
        encoder = Tokenizer.from_str(self._json)
        # a tokenizer.json may carry both, and a prompt is never cut in silence
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    @lru_cache(maxsize=4)  # noqa: B019  a guard lives as long as its stage
    def _splitter(self, mark: str) -> Tokenizer:
        """The tokenizer, splitting at `mark` and dropping it. After its own pre-tokenizer: that may
        add a space to each text."""
        encoder = self._new_encoder()
        split = pre_tokenizers.Split(Regex(re.escape(self._as_split(mark))), behavior="removed")
        steps = [encoder.pre_tokenizer, split] if encoder.pre_tokenizer else [split]
        encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return encoder

    def _as_split(self, mark: str) -> str:
        """`mark` as a byte-level tokenizer's splitter sees it: each byte as a character; elsewhere
        as it is."""
        if '"ByteLevel"' not in self._json:
            return mark
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return splitter.pre_tokenize_str(mark)[0][0]


def _matching(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each of `texts`; group 1 is the whole text."""
    longest_first = sorted(map(re.escape, texts), key=len, reverse=True)
    pattern = f"(?=({'|'.join(longest_first)}))." if longest_first else r"(?!)()"
    return re.compile(pattern, re.DOTALL)


def _ids(encoder: Tokenizer, text: str) -> list[int]:
    return encoder.encode(text, add_special_tokens=False).ids


def _bare(text: str) -> str:
    """Without what tokenizers may change in any text: white space and case."""
    return "".join(text.split()).casefold()
