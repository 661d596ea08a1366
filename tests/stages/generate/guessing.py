"""A game of several turns for the tests of generate: files of an environment and of a policy that
is a script, and what both would do, written out once more."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import numpy as np

from quiver.stages.core import plugins
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.prompt.stage import Config as PromptConfig
from tests.stages.generate.making import Honest, good
from tests.tiny import EOS, tokenizer

GAME = '''
import json
import os
import random
import time


class Guess:
    """Guess a number below `limit` in as many turns as you are given."""

    def __init__(self, seconds=0.0, broken=None, opening=True):
        self.seconds = seconds
        self.broken = broken
        self.opening = opening

    def reset(self, seed, limit, level):
        if self.broken == f"reset {level}" and not os.environ.get("RESET_WORKS"):
            raise ValueError("no number")
        self.number = random.Random(seed).randrange(limit)
        self.level = level
        if self.broken == "fickle":
            return f"Level {time.time_ns()}."
        opening = f"Level {level}."
        if self.broken == "silent" and not os.environ.get("RENDERING"):
            return None
        if self.broken == "talkative":
            extra = "a" if os.environ.get("RENDERING") else "b"
            return [{"role": "user", "content": text} for text in (extra, opening)]
        return opening if self.opening else None

    def step(self, turn):
        time.sleep(self.seconds)
        if self.broken == f"hang {self.level}":
            time.sleep(1000)
        if self.broken == f"die {self.level}":
            os._exit(7)
        if self.broken == f"raise {self.level}":
            raise RuntimeError("the dice are lost")
        if self.broken == f"shape {self.level}":
            return {"messages": [["user", "higher"]]}
        guess = int(turn.text) if turn.text.isdecimal() else -1
        if guess == self.number:
            return {"text": "right", "reward": 1.0, "done": True}
        hint = "higher" if guess < self.number else "lower"
        if os.environ.get("OTHER_HINTS"):
            hint = f"it is {hint}"
        return {"text": hint, "reward": 0.25, "info": {"number": self.number}}
'''
PLAYER = '''
import json
import os
import random
import re

from tests.tiny import tokenizer


def play(prompt_ids, seed):
    """Halve what is left, with a slip of one at random."""
    if os.environ.get("READ_LOG"):
        with open(os.environ["READ_LOG"], "a") as log:
            log.write(json.dumps(prompt_ids) + "\\n")
    text = tokenizer().decode(prompt_ids)
    low, high = 0, 15
    said = r"assistant.(\\d+)<.im_end.>.<.im_start.>user.(higher|lower)"
    for guess, hint in re.findall(said, text, re.S):
        if hint == "higher":
            low = max(low, int(guess) + 1)
        else:
            high = min(high, int(guess) - 1)
    guess = (low + high) // 2 + random.Random(seed).choice([0, 0, 1])
    return tokenizer().encode(str(guess), add_special_tokens=False)


def talk(prompt_ids, seed):
    """Many words, without an end."""
    return tokenizer().encode("seven " * 100, add_special_tokens=False)
'''


def write_game(folder: Path, count: int = 4) -> dict[str, str]:
    """The files, with `count` rows to ask; what a recipe calls them."""
    folder.mkdir(exist_ok=True)
    (folder / "game.py").write_text(GAME)
    (folder / "player.py").write_text(PLAYER)
    rows = [{"question": "Guess.", "limit": 16, "level": level} for level in range(count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "environment": f"{folder / 'game.py'}:Guess",
        "script": f"{folder / 'player.py'}:play",
        "source": str(folder / "rows.jsonl"),
    }


def render(store: Store, policy: Version, names: dict[str, str], **turns) -> Version:
    """The prompts of the game."""
    config = PromptConfig(
        source=names["source"],
        prompt="question",
        reserve_tokens=8,
        turns={"environment": names["environment"], **turns},
    )
    return store.open(run_stage("prompt", config, store, in_process=True, policy=str(policy.ref)))


def conversation(level: int, turns: list[dict]) -> list[dict]:
    """The chat that an episode is."""
    chat = [{"role": "user", "content": f"Guess.\n\nLevel {level}."}]
    for turn in turns:
        chat.append({"role": "assistant", "content": turn["text"]})
        if turn["observation_ids"]:
            chat.append({"role": "user", "content": turn["observation"]})
    return chat


def read_ids(row: dict, turns: int) -> list[int]:
    """What was read before turn number `turns`: prompt, then of each turn its ids and what was
    observed."""
    ids = list(row["prompt_ids"])
    start = 0
    for turn in row["turns"][:turns]:
        ids += row["completion_ids"][start : start + turn["length"]] + turn["observation_ids"]
        start += turn["length"]
    return ids


def number_of(seed: int) -> int:
    """What is to be guessed."""
    return random.Random(seed).randrange(16)


def guesses_of(row: dict) -> list[int]:
    """What an episode's turns said."""
    return [int(re.fullmatch(r"\d+", turn["text"])[0]) for turn in row["turns"]]


def rendered(chat: list[dict], *, generation: bool) -> list[int]:
    """The chat by transformers' own template."""
    text = tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
    return tokenizer().encode(text, add_special_tokens=False)


# -- engines

NO_GUESS = np.array([5, EOS], np.int32)
DOTTED = tokenizer().encode("seven.", add_special_tokens=False)[-2:]


class Watching(Honest):
    """Knows what it was asked for."""

    asked: dict[tuple[int, int], tuple[int, int]] = {}  # noqa: RUF012
    """Seed and most ids by row and turn."""

    def answers(self, request):
        self.asked[request.index, request.turn] = (request.seed, request.max_tokens)
        yield good(request.index, completion_ids=NO_GUESS)


class Dotting(Honest):
    """Ends each turn with a full stop, which is none of the model's ends."""

    def answers(self, request):
        yield good(request.index, completion_ids=np.array(DOTTED, np.int32), stop_reason=".")


class Ordered(Honest):
    """Takes up to eight requests at once, and has room for three rows; `order` is what it took."""

    ahead = 3
    order: list[tuple[int, int]] = []  # noqa: RUF012

    def generate(self, requests):
        flying = []
        while True:
            while len(flying) < 8 and (request := next(requests, None)):
                self.order.append((request.index, request.turn))
                flying.append(request)
            if not flying:
                return
            yield good(flying.pop(0).index, completion_ids=NO_GUESS)
            # the order is plain only if each environment has answered before the next request
            while len(requests._ready) < len(requests._running) - len(requests._unanswered):
                requests._hear(wait=0.1)


class Tires(Honest):
    """Plays the script $SCRIPT, and dies at its 20th turn, unless $AWAKE."""

    def __init__(self, setup) -> None:
        self.play, _ = plugins.load(os.environ["SCRIPT"], "test")
        self.count = 0

    def generate(self, requests):
        for request in requests:
            self.count += 1
            if self.count == 20 and not os.environ.get("AWAKE"):
                raise RuntimeError("tired")
            ids = np.array([*self.play(request.prompt_ids.tolist(), request.seed), EOS], np.int32)
            logprobs = np.full(len(ids), -1.0, np.float32)
            yield good(request.index, completion_ids=ids, logprobs=logprobs, stop_reason=str(EOS))
