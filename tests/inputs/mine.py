"""Reward functions of a user's, in a file beside the recipe."""


def polite(completions, number, **_):
    """Share of small letters and blanks; the column `number` decides the sign."""
    counts = [sum(c.islower() or c == " " for c in text) for text in completions]
    shares = [count / max(1, len(text)) for count, text in zip(counts, completions, strict=True)]
    return [share if each % 2 else -share for share, each in zip(shares, number, strict=True)]


async def even(completion_ids, half=1.0):
    """Share of even ids, times `half`; with what it counted."""
    rows = []
    for ids in completion_ids:
        count = sum(each % 2 == 0 for each in ids)
        rows.append({"reward": half * count / len(ids), "even": count})
    return rows
