"""A reward function that fails in every second row as long as a file `broken` lies beside it."""

from pathlib import Path


def sometimes(completion_ids, number):
    broken = Path(__file__).with_name("broken").exists()
    if broken and any(each % 2 for each in number):
        raise OSError("the judge is out")
    return [float(len(ids)) for ids in completion_ids]
