"""A reward function that notes which rows it is asked for, where a file `asked.txt` lies beside it."""

from pathlib import Path


def counted(completion_ids, rollout_ids):
    notes = Path(__file__).with_name("asked.txt")
    if notes.exists():
        with open(notes, "a") as file:
            file.writelines(f"{each}\n" for each in rollout_ids)
    return [len(ids) / 4 for ids in completion_ids]
