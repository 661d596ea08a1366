"""A script for the engine `scripted`; it notes each row's seed, where a file `asked.txt` lies beside it."""

from pathlib import Path


def answer(prompt_ids: list[int], seed: int) -> list[int]:
    notes = Path(__file__).with_name("asked.txt")
    if notes.exists():
        with open(notes, "a") as file:
            file.write(f"{seed}\n")
    return [*prompt_ids[: 1 + seed % 3], 40 + seed % 7]
