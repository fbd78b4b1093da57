"""Policies: which dtype parameters, computation and outputs have, and where that differs."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jmp
import numpy as np

from jaxmp import _devices, _tree
from jaxmp._dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    dtype_name,
    is_real_float,
    parse_dtype,
)
from jaxmp._errors import did_you_mean

T = TypeVar("T")

Rules = tuple[tuple[str, "Policy"], ...]

# What autocast can do with a primitive, see docs/autocast.md.
PRIMITIVE_CLASSES = ("low", "full", "follow", "opaque")

_OUTSIDE_BRACKETS = re.compile(r",(?![^()]*\))")
_RECIPE_GRAMMAR = re.compile(r"[A-Za-z]\w*(\([^()]*\))?")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Policy(jmp.Policy):
    """The dtypes of a mixed precision program: frozen, hashable and static.

    A `Policy` is a `jmp.Policy`, so code written for jmp takes it. Dtypes may be given in any way
    that `get_policy` or `np.dtype` understands and are kept as canonical `np.dtype`s. As a pytree
    it has no leaves, so it may be passed through `jax.jit`.

    Attributes:
        param_dtype: what parameters are stored in.
        compute_dtype: what matrix multiplications and convolutions take.
        output_dtype: what results are returned in.
        accum_dtype: what products accumulate in.
        reduce_dtype: what gradients are reduced in across devices.
        rules: pairs of a regular expression and the policy (or the name of one) for the leaves
            and modules whose path it is found in (`re.search`, paths like "blocks/0/attn/query");
            of several that match, the last wins.
        recipe: an fp8 recipe (`jaxmp.fp8`) or its text, such as "delayed(history=16)", by which
            the matmuls of layers are computed in 8 bits a number, or None. It is kept as text.
        activation_dtype: what `autocast` keeps results of matrix multiplications in, and what is
            computed of them. None, the default, is the compute dtype. With float32 only the
            operands of matrix multiplications are narrow, which takes more memory and gives more
            accurate gradients.
        primitives: pairs of the name of a JAX primitive and what `autocast` does with it: "low"
            (computed in the compute dtype), "full" (in float32), "follow" (in the dtype of its
            operands) or "opaque" (as the program has it).

    Raises:
        ValueError: for an unknown dtype or class, a regular expression that does not compile, or
            rules within rules.

    Example:
        >>> policy = Policy(compute_dtype="bfloat16", rules={"head": "float32"})
        >>> policy.for_path("head/kernel").compute_dtype
        dtype('float32')
        >>> str(Policy())
        'params=float32,compute=bfloat16,output=float32'
        >>> get_policy(str(policy)) == policy
        True
    """

    param_dtype: Any = FLOAT32
    compute_dtype: Any = BFLOAT16
    output_dtype: Any = FLOAT32
    _: dataclasses.KW_ONLY
    accum_dtype: Any = FLOAT32
    reduce_dtype: Any = FLOAT32
    rules: Any = ()
    recipe: Any = None
    activation_dtype: Any = None
    primitives: Any = ()

    def __post_init__(self) -> None:
        for key in _DTYPE_KEYS.values():
            object.__setattr__(self, key, parse_dtype(getattr(self, key)))
        activation_dtype = _parse_activation_dtype(self.activation_dtype, self.compute_dtype)
        object.__setattr__(self, "activation_dtype", activation_dtype)
        object.__setattr__(self, "primitives", _parse_primitives(self.primitives))
        object.__setattr__(self, "rules", _parse_rules(self.rules))
        object.__setattr__(self, "recipe", _parse_recipe(self.recipe))

    def cast_to_param(self, x: T) -> T:
        """Casts the real float leaves of a pytree to `param_dtype`, or to what the rules say.

        Integers, bools, complex, float64 (unless the policy names float64), fp8, PRNG keys, None,
        Python numbers and opaque leaves pass through untouched. NumPy arrays come back as JAX
        arrays, `jax.ShapeDtypeStruct`s as such.
        """
        return self._cast(x, "param_dtype")

    def cast_to_compute(self, x: T) -> T:
        """Casts the real float leaves of a pytree to `compute_dtype`; see `cast_to_param`."""
        return self._cast(x, "compute_dtype")

    def cast_to_output(self, x: T) -> T:
        """Casts the real float leaves of a pytree to `output_dtype`; see `cast_to_param`."""
        return self._cast(x, "output_dtype")

    def _cast(self, tree: T, key: str) -> T:
        def cast(name: str, leaf: Any) -> Any:
            policy = self.for_path(name)
            return _tree.cast_leaf(leaf, getattr(policy, key), float64=policy._names_float64())

        return _tree.map_named(cast, tree)

    def _names_float64(self) -> bool:
        return FLOAT64 in (self.param_dtype, self.compute_dtype, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Returns this policy with another `output_dtype`."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def with_rules(self, rules: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> "Policy":
        """Returns this policy with `rules` added after those that it has, so that they win.

        Args:
            rules: a dict or pairs, from a regular expression to a policy or the name of one.

        Example:
            >>> Policy().with_rules({"head": "float32", "norm": "float32"}).rules[0][0]
            'head'
        """
        return dataclasses.replace(self, rules=self.rules + _parse_rules(rules))

    def compute_dtypes(self) -> frozenset[np.dtype]:
        """Returns every dtype that anything is computed in, the rules included."""
        return frozenset({self.compute_dtype, *(rule.compute_dtype for _, rule in self.rules)})

    def recipes(self) -> frozenset[str]:
        """Returns every recipe that is named, the rules included."""
        named = {self.recipe, *(rule.recipe for _, rule in self.rules)}
        return frozenset(recipe for recipe in named if recipe is not None)

    def primitive_class(self, name: str) -> str | None:
        """Returns the class that this policy gives to a primitive of JAX, or None.

        Example:
            >>> Policy(primitives={"exp": "follow"}).primitive_class("exp")
            'follow'
        """
        return next((kind for key, kind in self.primitives if key == name), None)

    def for_path(self, path: str) -> "Policy":
        """Returns the policy of one path: that of the last rule found in it, else this one.

        Args:
            path: names joined by slashes, such as "blocks/0/attn/query/kernel".
        """
        for pattern, policy in reversed(self.rules):
            if re.search(pattern, path):
                return policy
        return dataclasses.replace(self, rules=()) if self.rules else self

    def unused_rules(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Returns the patterns that are found in none of `paths`.

        Example:
            >>> Policy().with_rules({"hed": "float32"}).unused_rules(["head/kernel"])
            ('hed',)
        """
        paths = list(paths)
        return tuple(
            pattern
            for pattern, _ in self.rules
            if not any(re.search(pattern, path) for path in paths)
        )

    def __str__(self) -> str:
        parts = []
        for key, field in _DTYPE_KEYS.items():
            dtype = getattr(self, field)
            if key in ("params", "compute", "output") or dtype != FLOAT32:
                parts.append(f"{key}={dtype_name(dtype)}")
        if self.recipe is not None:
            parts.append(f"recipe={self.recipe}")
        if self.activation_dtype is not None:
            parts.append(f"activation={dtype_name(self.activation_dtype)}")
        if self.primitives:
            parts.append(f"primitives={json.dumps(dict(self.primitives))}")
        if self.rules:
            rules = [[pattern, short_name(policy)] for pattern, policy in self.rules]
            parts.append(f"rules={json.dumps(rules, ensure_ascii=False)}")
        return ",".join(parts)

    def __repr__(self) -> str:
        return f"jaxmp.get_policy({str(self)!r})"


_DTYPE_KEYS = {
    "params": "param_dtype",
    "compute": "compute_dtype",
    "output": "output_dtype",
    "accum": "accum_dtype",
    "reduce": "reduce_dtype",
}
_KEY_ALIASES = {"p": "params", "c": "compute", "o": "output"} | {key: key for key in _DTYPE_KEYS}
_RULES_KEY = re.compile(r"(?:^|,)\s*rules\s*=")
_PRIMITIVES_KEY = re.compile(r"(?:^|,)\s*primitives\s*=\s*(\{[^{}]*\})")


def _parse_rules(rules: Any) -> Rules:
    items = rules.items() if isinstance(rules, Mapping) else rules or ()
    return tuple(_parse_rule(rule) for rule in items)


def _parse_rule(rule: Any) -> tuple[str, Policy]:
    if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
        raise ValueError(
            f"Bad rule {rule!r}: a rule is a pair (path regex, Policy or its name), for example "
            "('head', 'float32')."
        )
    pattern, policy = rule
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"Rule pattern {pattern!r} is no regular expression: {error}. Escape special "
            f"characters, for example with re.escape: {re.escape(pattern)!r}."
        ) from None
    policy = _as_policy(policy)
    if policy.rules:
        raise ValueError(
            f"The policy of rule {pattern!r} has rules of its own. Rules do not nest: list them "
            "all on the outer policy, the more special ones last."
        )
    return pattern, policy


def _as_policy(value: Any) -> Policy:
    if isinstance(value, Policy):
        return value
    if isinstance(value, jmp.Policy):
        return Policy(value.param_dtype, value.compute_dtype, value.output_dtype)
    return get_policy(value)


def _parse_activation_dtype(value: Any, compute_dtype: np.dtype) -> np.dtype | None:
    dtype = None if value is None else parse_dtype(value)
    if dtype in (None, compute_dtype):
        return None
    if dtype != FLOAT32 or not is_real_float(compute_dtype):
        raise ValueError(
            f"activation_dtype is {dtype_name(dtype)}, but must be float32 or the compute dtype, "
            f"{dtype_name(compute_dtype)}. Leave it out for the latter."
        )
    return dtype


def _parse_primitives(value: Any) -> tuple[tuple[str, str], ...]:
    items = value.items() if isinstance(value, Mapping) else value or ()
    classes = dict(map(_parse_primitive, items))
    return tuple(sorted(classes.items()))


def _parse_primitive(item: Any) -> tuple[str, str]:
    if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
        raise ValueError(
            f"Bad class of a primitive {item!r}: give pairs of the name of a primitive and its "
            "class, for example {'exp': 'follow'}."
        )
    name, kind = item
    if kind not in PRIMITIVE_CLASSES:
        raise ValueError(
            f"Unknown class {kind!r} of primitive {name!r}. Use one of "
            f"{', '.join(PRIMITIVE_CLASSES)}.{did_you_mean(str(kind), PRIMITIVE_CLASSES)}"
        )
    return name, kind


def _parse_recipe(recipe: Any) -> str | None:
    if recipe is None:
        return None
    text = re.sub(r"\s*([(),=])\s*", r"\1", str(recipe))
    if not _RECIPE_GRAMMAR.fullmatch(text):
        raise ValueError(
            f"Bad recipe {recipe!r}: use one of jaxmp.fp8, or its name such as 'mxfp8' or "
            "'delayed(history=16)'."
        )
    return text


_PRESETS = {
    "float32": Policy(FLOAT32, FLOAT32, FLOAT32),
    "bfloat16": Policy(BFLOAT16, BFLOAT16, BFLOAT16),
    "float16": Policy(FLOAT16, FLOAT16, FLOAT16),
    "float64": Policy(FLOAT64, FLOAT64, FLOAT64),
    "mixed_bfloat16": Policy(FLOAT32, BFLOAT16, FLOAT32),
    "mixed_float16": Policy(FLOAT32, FLOAT16, FLOAT32),
    "mixed_float8": Policy(FLOAT32, BFLOAT16, FLOAT32, recipe="current"),
    "mixed_mxfp8": Policy(FLOAT32, BFLOAT16, FLOAT32, recipe="mxfp8"),
}


def short_name(policy: Policy) -> str:
    """Returns the name of the preset that equals a policy, or its text."""
    for name, preset in _PRESETS.items():
        if preset == policy:
            return name
    return str(policy)


def get_policy(policy: str | jmp.Policy) -> Policy:
    """Returns the policy of a name or of a text.

    Args:
        policy: one of

            - a preset: `"float32"`, `"mixed_bfloat16"` (f32 parameters and results, bf16
              computation), `"mixed_float16"`, `"bfloat16"`, `"float16"`, `"float64"`,
              `"mixed_float8"`, `"mixed_mxfp8"`;
            - `"auto"`: the preset that fits the default device, see `recommend_policy`;
            - jmp's grammar: `"params=float32,compute=bfloat16,output=float32"`, `p=`, `c=` and
              `o=` for short; `params` is float32 if left out, `compute` follows `params` and
              `output` follows `compute`. A lone dtype (`"half"`, `"f32"`) stands for all three;
            - what `str(policy)` gives, with `accum=`, `reduce=`, `recipe=`, `activation=`,
              `primitives=` (JSON) and `rules=` (JSON, at the end);
            - a policy, which is returned as it is (a `jmp.Policy` as a `jaxmp.Policy`).

    Raises:
        ValueError: if the text names no policy.
        TypeError: if it is neither text nor a policy.

    Example:
        >>> get_policy("mixed_bfloat16") == get_policy("c=bf16,o=f32")
        True
    """
    if isinstance(policy, jmp.Policy):
        return _as_policy(policy)
    if not isinstance(policy, str):
        raise TypeError(
            f"A policy is text or a Policy, got {policy!r} of type {type(policy).__name__}. "
            "Try 'mixed_bfloat16'."
        )
    text = policy.strip()
    if text == "auto":
        return recommend_policy().policy
    if text in _PRESETS:
        return _PRESETS[text]
    return _parse_fields(text) if "=" in text else _parse_lone_dtype(text)


def _parse_lone_dtype(text: str) -> Policy:
    try:
        dtype = parse_dtype(text)
    except ValueError as error:
        hint = did_you_mean(text, [*_PRESETS, "auto"])
        if not hint and "Did you mean" in str(error):
            raise
        raise ValueError(
            f"Unknown dtype or preset {text!r}. Use a preset ({', '.join(_PRESETS)}, auto), a "
            f"dtype, or a text like 'params=float32,compute=bfloat16,output=float32'.{hint}"
        ) from None
    return Policy(dtype, dtype, dtype)


def _parse_fields(text: str) -> Policy:
    fields, rules = _split_rules(text)
    fields, primitives = _split_primitives(fields, text)
    values: dict[str, str] = {}
    for part in _OUTSIDE_BRACKETS.split(fields) if fields else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        name = key if key in ("recipe", "activation") else _KEY_ALIASES.get(key)
        if not equals or name is None:
            more = ("accum", "reduce", "recipe", "activation", "primitives", "rules")
            known = ("params", "compute", "output", *more)
            raise ValueError(
                f"Unknown key {key!r} in policy {text!r}. Use 'params', 'compute' or 'output' "
                f"(or {', '.join(more)}), each with '='.{did_you_mean(key, known)}"
            )
        if name in values:
            raise ValueError(f"Key {name!r} stands twice in policy {text!r}. Give it once.")
        values[name] = value
    recipe = values.pop("recipe", None)
    dtypes = {name: parse_dtype(value) for name, value in values.items()}
    param = dtypes.get("params", FLOAT32)
    compute = dtypes.get("compute", param)
    return Policy(
        param,
        compute,
        dtypes.get("output", compute),
        accum_dtype=dtypes.get("accum", FLOAT32),
        reduce_dtype=dtypes.get("reduce", FLOAT32),
        rules=rules,
        recipe=recipe,
        activation_dtype=dtypes.get("activation"),
        primitives=primitives,
    )


def _split_primitives(fields: str, text: str) -> tuple[str, dict[str, Any]]:
    found = _PRIMITIVES_KEY.search(fields)
    if not found:
        return fields, {}
    try:
        primitives = json.loads(found[1])
    except json.JSONDecodeError as error:
        raise ValueError(
            f"The primitives of policy {text!r} are no JSON object ({error}). Write them as "
            'primitives={"exp":"follow"}.'
        ) from None
    rest = (fields[: found.start()], fields[found.end() :].lstrip(" ,"))
    return ",".join(part for part in rest if part), primitives


def _split_rules(text: str) -> tuple[str, list[Any]]:
    found = _RULES_KEY.search(text)
    if not found:
        return text, []
    try:
        rules = json.loads(text[found.end() :])
    except json.JSONDecodeError as error:
        rules = error
    if not isinstance(rules, list):
        raise ValueError(
            f"The rules of policy {text!r} are no JSON list ({rules}). Write them last, as "
            'rules=[["head","float32"]].'
        )
    return text[: found.start()], rules


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A policy for a device, and why.

    Attributes:
        policy: the recommended policy.
        reason: one sentence for people.
    """

    policy: Policy
    reason: str


def recommend_policy(device: Any = None) -> Recommendation:
    """Returns the mixed precision policy that fits a device, and the reason.

    TPUs and NVIDIA GPUs from compute capability 8.0 on get bf16; older NVIDIA GPUs get f16 (there
    XLA compiles bf16 products as f32), which `mixed_precision` runs with dynamic loss scaling;
    CPUs get bf16 where the processor multiplies it, else f32.

    Args:
        device: a JAX device; the default device if left out.

    Example:
        >>> recommendation = recommend_policy()
        >>> recommendation.policy == get_policy("auto")
        True
    """
    dtype, reason = _devices.best_compute_dtype(device or jax.local_devices()[0])
    preset = "float32" if dtype == FLOAT32 else f"mixed_{dtype_name(np.dtype(dtype))}"
    return Recommendation(_PRESETS[preset], reason)
