"""Which policy each module of a model has: by rules on its path or type, or by its own dtype."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp import _tree
from jaxmp._dtypes import HALF_DTYPES, is_real_float
from jaxmp._errors import bullet_list
from jaxmp._table import render
from jaxmp.autocast import autocast, check_runnable, rewritten
from jaxmp.policy import Policy, get_policy, short_name

Pattern = str | type


@dataclasses.dataclass(frozen=True)
class Found:
    """The policy of a module.

    Attributes:
        policy: it has no rules.
        rule: the index of the rule that gave it; -1 if none did.
        reason: what gave it, for people.
    """

    policy: Policy
    rule: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ModuleRules:
    """A policy, and rules for modules: hashable.

    Attributes:
        policy: of what no rule holds for; it has no rules itself.
        rules: pairs of a path's regular expression or a type of modules, and a policy.
    """

    policy: Policy
    rules: tuple[tuple[Pattern, Policy], ...]

    @classmethod
    def parse(
        cls, policy: Policy | str, rules: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None
    ) -> "ModuleRules":
        """Returns the rules of a policy, and more that win.

        Raises:
            ValueError: if a rule is neither about a path nor about a type.
        """
        policy = get_policy(policy)
        items = rules.items() if isinstance(rules, Mapping) else rules or ()
        parsed: list[tuple[Pattern, Policy]] = [*policy.rules]
        for pattern, value in items:
            # A policy checks what is wrong with a rule; a type stands for its name meanwhile.
            is_type = isinstance(pattern, type)
            ((name, own),) = Policy(rules=[(pattern.__name__ if is_type else pattern, value)]).rules
            parsed.append((pattern if is_type else name, own))
        found = cls(dataclasses.replace(policy, rules=()), tuple(parsed))
        for each in (found.policy, *(own for _, own in found.rules)):
            check_runnable(each)
        return found

    def find(
        self,
        path: str,
        module: Any,
        dtype: np.dtype | None,
        leaves: Iterable[str] = (),
        parent: Found | None = None,
    ) -> Found:
        """Returns the policy of a module: that of the last rule for it, or for one that it is in.

        A dtype that the module itself was given wins.

        Args:
            path: of the module.
            module: for its type.
            dtype: what the module was told to compute in, or None.
            leaves: the paths of its own parameters; a rule may be about one of them.
            parent: what was found for the module that it is in.
        """
        rule = -1 if parent is None else parent.rule
        names = (path, *leaves)
        for i, (pattern, _) in enumerate(self.rules):
            if i > rule and _matches(pattern, module, names):
                rule = i
        policy = self.policy if rule < 0 else self.rules[rule][1]
        reason = "policy" if rule < 0 else f"rule {_text_of(self.rules[rule][0])!r}"
        if dtype is None or dtype == policy.compute_dtype:
            return Found(policy, rule, reason)
        policy = dataclasses.replace(policy, compute_dtype=dtype, activation_dtype=None)
        return Found(policy, rule, f"dtype={dtype.name}")

    def unused(self, modules: Mapping[str, Any], leaves: Iterable[str]) -> list[Pattern]:
        """Returns the patterns of rules that hold for nothing.

        Args:
            modules: by path.
            leaves: paths of parameters.
        """
        leaves = list(leaves)
        return [
            pattern
            for pattern, _ in self.rules
            if not any(_matches(pattern, module, (path,)) for path, module in modules.items())
            and not (isinstance(pattern, str) and any(re.search(pattern, x) for x in leaves))
        ]

    def message_of_unused(
        self, unused: Sequence[Pattern], paths: Iterable[str], types: Iterable[type]
    ) -> str:
        """Returns what to tell people about rules that hold for nothing."""
        paths, names = sorted(set(paths)), sorted({t.__name__ for t in types})
        lines = []
        for pattern in unused:
            known = names if isinstance(pattern, type) else paths
            near = difflib.get_close_matches(_text_of(pattern), known, n=3, cutoff=0.3)
            lines.append(f"{_text_of(pattern)!r}; nearest: {', '.join(near) or 'none'}")
        return (
            f"Rules that hold for no module:\n{bullet_list(lines)}\n"
            f"A rule is a regular expression that is found in a path, of {len(paths)} here such as "
            f"{(paths or ['(none)'])[-1]!r}, or a type of modules."
        )

    @property
    def is_float32(self) -> bool:
        """Whether all is computed in f32, save what modules cast by themselves."""
        policies = (self.policy, *(own for _, own in self.rules))
        return not any(p.compute_dtype in HALF_DTYPES for p in policies)

    def autocast(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function in mixed precision, whose modules stand in scopes of policies."""
        return autocast(fun, self.policy) if self.is_float32 else rewritten(fun, self.policy)


def _matches(pattern: Pattern, module: Any, names: Sequence[str]) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return any(re.search(pattern, name) for name in names)


def _text_of(pattern: Pattern) -> str:
    return pattern.__name__ if isinstance(pattern, type) else pattern


def own_dtype(module: Any) -> np.dtype | None:
    """Returns the dtype that a module was told to compute in; None if it was told none."""
    return _real_float(vars(module).get("dtype"))


def own_param_dtype(module: Any) -> np.dtype | None:
    """Returns the dtype narrower than f32 that a module was told to store parameters in."""
    dtype = _real_float(vars(module).get("param_dtype"))
    return dtype if dtype in HALF_DTYPES else None


def _real_float(value: Any) -> np.dtype | None:
    try:
        dtype = None if value is None else np.dtype(value)
    except TypeError:
        return None
    return dtype if is_real_float(dtype) else None


def narrowed_output(policy: Policy, outer: Policy, output: Any) -> Any:
    """Casts what an inner module returns, if its policy asks for a half dtype and the outer not."""
    if policy.output_dtype == outer.output_dtype or policy.output_dtype not in HALF_DTYPES:
        return output
    return policy.cast_to_output(output)


def of_arrays(fun: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """Returns a function of arrays alone, and the arrays: all else among the arguments is fixed."""
    leaves, treedef = jax.tree.flatten(args)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "shape")]
    fixed = [None if hasattr(leaf, "shape") else leaf for leaf in leaves]
    return functools.wraps(fun)(_with_fixed(fun, treedef, fixed)), *arrays


def _with_fixed(fun: Callable[..., Any], treedef: Any, fixed: Sequence[Any]) -> Callable[..., Any]:
    """Returns a function of the leaves that are None here."""

    def of(*arrays: Any) -> Any:
        given = iter(arrays)
        return fun(*treedef.unflatten([next(given) if x is None else x for x in fixed]))

    return of


def call(make: Callable[..., Any], key: tuple[Any, ...], *args: Any) -> Any:
    """Returns `make(*key)(*args)`; outside of jit it is compiled as a whole, once for each key.

    Rewriting a program at each call would take longer than running it. What depends on Python
    numbers, or has no hash, is run as it is: it could be another program each time.

    Args:
        make: returns the function.
        key: what it depends on. Parts that are equal but look different differ: 1, 1.0, True.
        *args: of the function.
    """
    leaves, treedef = jax.tree.flatten(args)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]
    fixed = tuple(None if isinstance(x, jax.Array | np.ndarray) else x for x in leaves)
    is_plain = all(isinstance(x, bool | str | None) for x in fixed)
    if is_plain and not any(map(_tree.is_traced, arrays)):
        try:
            return _compiled(make, key, repr(key), treedef, fixed)(*arrays)
        except (_HasOtherResultsError, TypeError):
            pass
    return make(*key)(*args)


class _HasOtherResultsError(Exception):
    """A function returns what is no array."""


@functools.lru_cache(maxsize=256)
def _compiled(
    make: Callable[..., Any], key: tuple[Any, ...], _: str, treedef: Any, fixed: Sequence[Any]
) -> Callable[..., Any]:
    fun = _with_fixed(make(*key), treedef, fixed)

    def checked(*arrays: Any) -> Any:
        results = fun(*arrays)
        if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(results)):
            raise _HasOtherResultsError
        return results

    return jax.jit(checked)


@dataclasses.dataclass(frozen=True)
class PolicyRow:
    """A module in a `PolicyTable`.

    Attributes:
        path: of the module; empty for the root.
        type_name: of the module.
        policy: its policy.
        reason: "policy", the rule, or the dtype that the module was given.
        param_dtypes: of its own parameters, as they are stored.
        products: operand dtypes of its own matmuls and convolutions, as the program has them.
    """

    path: str
    type_name: str
    policy: Policy
    reason: str
    param_dtypes: tuple[str, ...]
    products: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PolicyTable:
    """Which module computes in what: print it.

    Attributes:
        rows: one for each module, in the order they stand in the model.
        unused: the patterns of rules that hold for no module.
    """

    rows: tuple[PolicyRow, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        header = ("module", "type", "params", "products", "policy", "from")
        rows = [
            [
                row.path or "(root)",
                row.type_name,
                ", ".join(row.param_dtypes) or "–",
                ", ".join(row.products) or "–",
                short_name(row.policy),
                row.reason,
            ]
            for row in self.rows
        ]
        text = render("Policies of modules", header, rows, right=set())
        unused = "".join(f"\nunused rule: {pattern!r}" for pattern in self.unused)
        return text + unused


def policy_table(
    rules: ModuleRules,
    modules: Mapping[str, tuple[Any, Found]],
    params: Mapping[str, Mapping[str, Any]],
    products: Iterable[tuple[str, tuple[str, ...]]],
) -> PolicyTable:
    """Returns the table of a model.

    Args:
        rules: of the model.
        modules: each module and what was found for it, by path.
        params: the parameters of each module alone, by path and name.
        products: the path and the operand dtypes of each matmul and convolution.
    """
    dtypes: dict[str, dict[str, int]] = {path: {} for path in modules}
    for path, operands in products:
        owner = _owner(path, modules)
        text = "×".join(dict.fromkeys(operands))
        dtypes[owner][text] = dtypes[owner].get(text, 0) + 1
    leaves = [f"{path}/{name}".lstrip("/") for path, own in params.items() for name in own]
    unused = rules.unused({path: module for path, (module, _) in modules.items()}, leaves)
    rows = tuple(
        PolicyRow(
            path,
            type(module).__name__,
            found.policy,
            found.reason,
            tuple(dict.fromkeys(str(np.dtype(x.dtype)) for x in params.get(path, {}).values())),
            tuple(f"{count} {text}" for text, count in dtypes[path].items()),
        )
        for path, (module, found) in modules.items()
    )
    return PolicyTable(rows, tuple(map(_text_of, unused)))


def _owner(path: str, modules: Mapping[str, Any]) -> str:
    """Returns the innermost module that a path is in."""
    # A method stands in a scope of the module's name and its own: "attn.decode".
    parts = [part.partition(".")[0] for part in path.split("/")]
    for end in range(len(parts), 0, -1):
        if "/".join(parts[:end]) in modules:
            return "/".join(parts[:end])
    return ""
