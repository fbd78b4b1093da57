"""Wording of errors: the value, the rule and the remedy."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the nearest choice, or an empty string.

    Example:
        >>> did_you_mean("flaot32", ["float32", "float16"])
        " Did you mean 'float32'?"
    """
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def bullet_list(lines: Iterable[str], limit: int = 20) -> str:
    """Joins `lines` as an indented list and says how many were left off past `limit`."""
    lines = list(lines)
    shown = [f"  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  … and {len(lines) - limit} more")
    return "\n".join(shown)
