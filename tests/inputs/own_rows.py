"""Rows by a generator in a file."""


def rows(count, first=0):
    for number in range(first, first + count):
        yield {"name": f"n{number}", "text": f"{number}+1=", "number": number, "answer": number + 1}
