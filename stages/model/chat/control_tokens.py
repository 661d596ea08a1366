"""Encodes rendered text so that user text never becomes a control id.

A template's text and a user's text meet in one string, and a tokenizer finds its added tokens
anywhere in it. So each rendering is compared with a rendering of neutral contents: the sequence of
control ids must be the same. If it is (nearly always), the ids are the canonical ones.

If a content would forge a token, marks are put inside the token's text and the template is rendered
with them. A tokenizer that splits at the marks and drops them then encodes the whole: the same
text, in more pieces, with the template's own tokens intact. If even this gives other control ids,
SecurityError names the prompt.

Control ids are the ids of all added tokens, special or not, except:

- tokens of white space alone (some tokenizers spell indentation with them);
- the id for "unknown", if the tokenizer needs it for text that it cannot spell;
- ids that the caller permits: `anywhere` in any content, `trusted_only` in trusted contents (the
  recipe's and the policy's own). `generation_prompt.learn_markup` finds these ids for a template.
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
# private use characters; Old Italic for tokenizers that strip those
_MARKS = (*range(0xE000, 0xF8FF), *range(0x10300, 0x10320))
_RARE = "\U0010fffd 𐎠 𪛖 ᚠ 🜁"  # characters that become "unknown" if the tokenizer cannot spell them


class Rendering(NamedTuple):
    """A rendered prompt: the text for display, the ids for the engine."""

    text: str
    ids: list[int]


class Guard:
    """Encoder that knows a tokenizer's control ids, and how its sequences start and end."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        closes: bool = False,
        anywhere: Collection[int] = (),
        trusted_only: Collection[int] = (),
    ) -> None:
        """Read the control ids of `tokenizer`.

        Args:
            tokenizer: The model's tokenizer.
            closes: If true, prompts end as the tokenizer's post-processor ends them, because
                encoder-decoder models read whole sequences.
            anywhere: Added tokens that any content may hold.
            trusted_only: Further added tokens, which trusted contents may hold.
        """
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
        """Pattern of the first character of a control token's text; group 1 is the whole text."""
        self._forbidden = _matching(
            text for id, text in added_tokens.items() if id not in trusted_only
        )
        """The same pattern for the tokens that not even trusted contents may hold."""
        texts = sorted((added_tokens[id] for id in trusted_only if id in added_tokens), key=len)
        self._markup = re.compile("|".join(map(re.escape, reversed(texts))) or r"(?!)")
        self._neutral_controls: dict[tuple, list[int]] = {}
        # the ids that the post-processor puts before and after a text
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
        """Encode `render(contents)` so that it has only the control ids of a neutral rendering.

        Args:
            name: Name of the prompt, for errors.
            shape: Key of everything that `render` puts around the contents: with the same shape,
                equal neutral contents are rendered equally.
            contents: Texts from users and others.
            render: Renders the template with the given contents.
            trusted: Positions of the contents that keep their markup.
            is_whole: If true, the ids are a sequence with its start and end. If false, they are a
                piece of one, without additions.

        Raises:
            SecurityError: No spelling keeps the control ids; names the prompt.
        """
        frame = self.framed if is_whole else list
        # trusted contents without markup are treated like all others
        keeping = {n for n in trusted if self._markup.search(contents[n])}
        # equal contents stay equal, different ones different, since templates may compare messages
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
        if keeping:  # markup cannot be kept if the content also needs spelling out
            return self.encode(name, shape, contents, render, is_whole=is_whole)
        raise SecurityError(
            name,
            "its text would become control tokens of the template, and no spelling was found that "
            "would not",
            next="take the row out of the source, or give prompt_ids",
        )

    def spelled_out(self, contents: list[str], trusted: Collection[int] = ()) -> list[str]:
        """Return the control tokens whose text is in `contents` and which `encode` spells out."""
        found = dict.fromkeys(
            match[1]
            for n, content in enumerate(contents)
            for match in (self._forbidden if n in trusted else self._token).finditer(content)
        )
        return list(found)

    def _neutral(self, content: str, word: str, keeps_markup: bool) -> str:
        """Return a content with `word` in place of its words; markup stays if `keeps_markup`."""
        if not keeps_markup:
            return word if content.strip() else " " * bool(content)
        between = self._markup.split(content)
        words = [word if text.strip() else text for text in between]
        tags = [*self._markup.findall(content), ""]
        return "".join(word + tag for word, tag in zip(words, tags, strict=True))

    def missing_start(self, text: str) -> str:
        """Return the start (BOS) that `encode` adds because `text` does not begin with it.

        Empty if `text` begins with it or the tokenizer has none.
        """
        begins = _ids(self._encoder, text)[: len(self._start)] == self._start
        return "" if begins else self.decode(self._start)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, including control tokens."""
        return self._encoder.decode(ids, skip_special_tokens=False)

    def first_control(self, text: str) -> int | None:
        """Return the control id that `text` begins with, or None."""
        ids = _ids(self._encoder, text)
        return ids[0] if ids and ids[0] in self._control_ids else None

    def token_ends(self, text: str) -> list[int]:
        """Return the positions in `text` where its tokens end, ascending."""
        return [end for _, end in self._encoder.encode(text, add_special_tokens=False).offsets]

    def framed(self, ids: list[int]) -> list[int]:
        """Return `ids` as a whole sequence.

        It has exactly one start (BOS) if the tokenizer adds one, whether or not the template wrote
        it. It has the end too if the guard `closes`.
        """
        while self._start and ids[: len(self._start)] == self._start:
            ids = ids[len(self._start) :]
        if self._end and ids[-len(self._end) :] == self._end:
            return self._start + ids
        return self._start + ids + self._end

    def _controls(self, ids: list[int]) -> list[int]:
        """Return the control ids among `ids`, in order."""
        return [id for id in ids if id in self._control_ids]

    def _spellings(
        self, contents: list[str], render: Render, text: str, keeping: Collection[int]
    ) -> Iterator[Rendering]:
        """Yield renderings of `contents` with marks put in, if template and tokenizer keep marks.

        First the marks go behind the first character of each control token's text, then between all
        characters, except in the contents in `keeping`. `text` is the plain rendering.
        """
        used = set(text).union(*contents)
        normalizer = self._encoder.normalizer

        def is_free(mark: str) -> bool:
            """True if no text holds the mark and the tokenizer's normalizer keeps it."""
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
            core = content.strip()  # marks stay inside, because templates may strip contents
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
        # a tokenizer.json may set truncation and padding; a prompt must never be cut silently
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    @lru_cache(maxsize=4)  # noqa: B019  a guard lives as long as its stage
    def _splitter(self, mark: str) -> Tokenizer:
        """Return the tokenizer, changed to split at `mark` and drop it.

        It splits after its own pre-tokenizer, which may add a space to each text.
        """
        encoder = self._new_encoder()
        split = pre_tokenizers.Split(Regex(re.escape(self._as_split(mark))), behavior="removed")
        steps = [encoder.pre_tokenizer, split] if encoder.pre_tokenizer else [split]
        encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return encoder

    def _as_split(self, mark: str) -> str:
        """Return `mark` as the splitter sees it: one character per byte for byte-level tokenizers,
        unchanged for others."""
        if '"ByteLevel"' not in self._json:
            return mark
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return splitter.pre_tokenize_str(mark)[0][0]


def _matching(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the first character of each of `texts`; group 1 is the whole text."""
    longest_first = sorted(map(re.escape, texts), key=len, reverse=True)
    pattern = f"(?=({'|'.join(longest_first)}))." if longest_first else r"(?!)()"
    return re.compile(pattern, re.DOTALL)


def _ids(encoder: Tokenizer, text: str) -> list[int]:
    return encoder.encode(text, add_special_tokens=False).ids


def _bare(text: str) -> str:
    """Return `text` without white space and case, which tokenizers may change in any text."""
    return "".join(text.split()).casefold()
