"""Numbers for people."""

import math

_UNITS = ("", "k", "M", "G", "T", "P", "E")


def quantity(value: float, unit: str) -> str:
    """Returns a number with a decimal prefix and three digits.

    Example:
        >>> quantity(4_194_304, "B"), quantity(51_539_607_552, "FLOP"), quantity(12, "B")
        ('4.19 MB', '51.5 GFLOP', '12 B')
    """
    power = 0
    while abs(value) >= 999.5 and power < len(_UNITS) - 1:
        value /= 1000
        power += 1
    digits = f"{value:.0f}" if power == 0 else f"{value:.3g}"
    return f"{digits} {_UNITS[power]}{unit}".rstrip()


def parse_bytes(text: str | int) -> int:
    """Returns the bytes of `"16GB"`, `"16 GiB"`, `"900MB"` or of a number.

    Raises:
        ValueError: if the text is no size.

    Example:
        >>> parse_bytes("16GB"), parse_bytes("1.5 KiB")
        (16000000000, 1536)
    """
    if isinstance(text, int):
        return text
    number = text.strip().rstrip("BbiKkMGT").strip()
    suffix = text.strip()[len(number) :].strip().lower()
    factor = _FACTORS.get(suffix)
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if factor is None or not 0 <= size < math.inf:
        raise ValueError(
            f"Bad size {text!r}. Write a number and a unit, such as '16GB', '900MB' or '1.5GiB'."
        )
    return int(size * factor)


_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _FACTORS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def short(dtype: str) -> str:
    """Returns the short name of a dtype.

    Example:
        >>> short("float32"), short("bfloat16"), short("float8_e4m3fn"), short("int32")
        ('f32', 'bf16', 'e4m3fn', 'i32')
    """
    name = dtype.removeprefix("float8_").removeprefix("float4_")
    for long, letter in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return letter + name.removeprefix(long)
    return name
