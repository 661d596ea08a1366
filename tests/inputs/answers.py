"""A script for the engine `scripted`."""


def answer(prompt_ids: list[int], seed: int) -> list[int]:
    return [*prompt_ids[: 1 + seed % 3], 40 + seed % 7]
