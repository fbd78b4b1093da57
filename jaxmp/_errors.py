"""Wording of errors: the value, the rule and the remedy."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the nearest choice, or an empty string.

    Example:
        >>> did_you_mean("flaot32", ["float32", "float16"])
        " Did you mean 'float32'?"
    """
    close = nearest(word, choices)
    return f" Did you mean {close!r}?" if close else ""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice most like `word`, one with the same letters first, or None."""
    close = difflib.get_close_matches(word, list(choices), n=5, cutoff=0.6)
    swapped = [choice for choice in close if sorted(choice) == sorted(word)]
    return next(iter(swapped + close), None)


def bullet_list(lines: Iterable[str], limit: int = 20) -> str:
    """Joins `lines` as an indented list and says how many were left off past `limit`."""
    lines = list(lines)
    shown = [f"  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  … and {len(lines) - limit} more")
    return "\n".join(shown)


def check_choice(value: Any, choices: Sequence[str], name: str) -> None:
    """Raises ValueError unless a value is one of those that there are."""
    if value not in choices:
        raise ValueError(
            f"{name} is {value!r}, but must be one of {', '.join(choices)}."
            f"{did_you_mean(str(value), choices)}"
        )


def check_count(count: Any, name: str) -> None:
    """Raises ValueError unless a count is an integer of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} is {count!r}, but must be an integer of at least 1.")
