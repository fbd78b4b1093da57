"""Flax Linen: models in mixed precision, by rules on the paths and types of their modules.

`wrap(model, policy)` is a model with the same variables, whose `init` stores parameters and whose
`apply` computes as the policy says, without a `dtype=` anywhere.

Importing this module also lets `flax.serialization` save jaxmp's states: `to_state_dict`,
`to_bytes` and their inverses take loss scales, optimizer states and `TrainState`s. A state dict
holds the arrays; the static options of a loss scale (period, factor, floor, ...) come from the
target, as with any Flax dataclass.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
from flax import linen as nn
from flax import serialization, traverse_util

from jaxmp import _tree
from jaxmp._dtypes import FLOAT32
from jaxmp._modules import (
    Found,
    ModuleRules,
    PolicyTable,
    call,
    narrowed_output,
    of_arrays,
    own_dtype,
    own_param_dtype,
    policy_table,
)
from jaxmp.audit import audit
from jaxmp.autocast._region import policy_scope
from jaxmp.fp8 import ProductState
from jaxmp.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from jaxmp.optim._mixed_precision import GradientNames
from jaxmp.policy import Policy
from jaxmp.train import TrainState

__all__ = ["unwrap", "wrap"]

M = TypeVar("M", bound=nn.Module)

# Marks whose operations these are, where a table of modules is made.
_MODULE = "module:"


def wrap(
    module: M,
    policy: Policy | str,
    *,
    rules: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None = None,
) -> M:
    """Returns a Linen module that computes under a policy, with the same variables.

    `init` stores the parameters in `param_dtype`; other collections, such as batch statistics,
    stay f32. `apply` (with `mutable`, `method`, `capture_intermediates` as ever) computes as
    `jaxmp.autocast` does and casts what the method returns to `output_dtype`; the variables that
    it returns keep their dtypes. Parameters of an unwrapped model fit, and the other way round.

    The wrapped module is an instance of a subclass of the module's class: it stands wherever the
    module stood, in Flax's `TrainState` too. It goes around the outermost module.

    Args:
        module: an unbound instance.
        policy: a policy or the name of one. Its rules are regular expressions that are found in
            the path of a module ("encoder/block_0/attention"), or of one of its parameters. A rule
            holds for the modules inside too; of several the last wins. A module that is shared has
            the path that its parameters have.
        rules: more of them, after those of the policy; the pattern may be a type of modules too,
            such as `nn.LayerNorm`, and then holds for its subclasses.

    A module that was given a `dtype` computes in that, whatever the rules say, and parameters that
    it is told to store in half stay half. `wrapped.policy_table(variables, *args)`, with the
    arguments of `apply`, shows which module computes in what.

    Raises:
        TypeError: if `module` is no Linen module, or a class instead of an instance.
        ValueError: if it is bound or wrapped already; from `init`, if a rule holds for nothing.

    Warns:
        UserWarning: from `apply`, if a rule holds for nothing.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> model = wrap(nn.Dense(4), "mixed_bfloat16")
        >>> x = jnp.full((1, 2), 1.001)
        >>> variables = model.init(jax.random.key(0), x)
        >>> variables["params"]["kernel"].dtype, model.apply(variables, x).dtype
        (dtype('float32'), dtype('float32'))
        >>> print(model.policy_table(variables, x))
        Policies of modules
         module   type    params    products     policy           from
         ───────────────────────────────────────────────────────────────
         (root)   Dense   float32   1 bfloat16   mixed_bfloat16   policy
    """
    _check(module)
    cls = _wrapped_class(type(module), ModuleRules.parse(policy, rules))
    return cls(**_fields(module))


def unwrap(module: M) -> M:
    """Returns the module that was wrapped.

    Example:
        >>> type(unwrap(wrap(nn.Dense(4), "mixed_bfloat16"))) is nn.Dense
        True
    """
    if not isinstance(module, _Wrapped):
        raise TypeError(f"{type(module).__name__} is not wrapped: pass what jaxmp.linen.wrap gave.")
    return module.wrapped_class(**_fields(module))


def _check(module: Any) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise TypeError(
            f"{module.__name__} is a class: wrap an instance, wrap({module.__name__}(...), policy)."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{type(module).__name__} is no Linen module. Wrap an instance of nn.Module; for NNX "
            "use jaxmp.nnx.wrap, for a function jaxmp.autocast."
        )
    if isinstance(module, _Wrapped):
        raise ValueError(
            f"This {type(module).__name__} is wrapped already. Wrap unwrap(module), or give the "
            "first wrap all rules."
        )
    if module.scope is not None or isinstance(module.parent, nn.Module):
        raise ValueError(
            f"This {type(module).__name__} is bound, inside setup, a compact method or bind. Wrap "
            "the outermost module, before it has variables, with rules for this one."
        )


def _fields(module: nn.Module) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(module) if f.init and f.name != "parent"]
    return {name: getattr(module, name) for name in names}


class _Wrapped:
    """What a wrapped class does otherwise than the class of the module.

    Attributes:
        wrapped_class: the class of the module.
        module_rules: the policies.
    """

    wrapped_class: Any
    module_rules: ModuleRules

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if isinstance(self.parent, nn.Module):  # type: ignore[attr-defined]
            raise ValueError(
                f"A wrapped {type(self).__name__} stands inside a "
                f"{type(self.parent).__name__}. "  # type: ignore[attr-defined]
                "Wrap the outermost module, with rules for this one."
            )

    def __reduce__(self) -> Any:
        return _rewrap, (unwrap(self), self.module_rules)  # type: ignore[type-var]

    def apply(
        self,
        variables: Any,
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Any = False,
        capture_intermediates: Any = False,
        **kwargs: Any,
    ) -> Any:
        """`nn.Module.apply` under the policy."""
        mutable = tuple(mutable) if isinstance(mutable, list) else mutable
        key = (self, method, mutable, capture_intermediates)
        if method is None or isinstance(method, str) or _is_own(self, method):
            return call(_applied, key, variables, args, kwargs, rngs)
        return _applied(*key)(variables, args, kwargs, rngs)

    def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
        """`nn.Module.init_with_output`, with parameters in `param_dtype`."""
        init, names = super().init_with_output, {}  # type: ignore[misc]
        if any(isinstance(pattern, str) for pattern, _ in self.module_rules.rules):
            # A rule may be about a parameter, so their names have to be known first.
            of_shapes, *arrays = of_arrays(
                lambda args, kwargs: init(*args, **kwargs)[1], args, kwargs
            )
            names = jax.eval_shape(of_shapes, *arrays)
        visit = _Visit(self.module_rules, names)
        with nn.intercept_methods(visit):
            output, variables = init(*args, **kwargs)
        visit.leaves = _leaves_by_module(variables)
        message = visit.message_of_unused()
        if message:
            raise ValueError(message)
        return self.module_rules.policy.cast_to_output(output), visit.stored(variables)

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: calls of a bound module are not seen from outside."""
        raise ValueError(
            "A wrapped module cannot be bound: its calls would run in float32. Use "
            "wrapped.apply(variables, x, method=...), or bind unwrap(wrapped)."
        )

    def policy_table(self, variables: Any, *args: Any, **kwargs: Any) -> PolicyTable:
        """Returns which module computes in what, for the arguments of `apply`; runs nothing."""
        visit = _Visit(self.module_rules, variables)

        def name(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            with jax.named_scope(_MODULE + "|".join(context.module.path)):
                return visit(next_fun, args, kwargs, context)

        def fun(variables: Any, args: Any, kwargs: Any) -> Any:
            with nn.intercept_methods(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self.apply(variables, *args, **kwargs)

        report = audit(*of_arrays(fun, variables, args, kwargs), target=None)
        products = [
            (
                row.path.rpartition(_MODULE)[2].partition("/")[0].replace("|", "/"),
                row.operand_dtypes,
            )
            for row in report.products
        ]
        return policy_table(self.module_rules, visit.seen, visit.leaves, products)


def _applied(
    module: Any, method: Any, mutable: Any, capture_intermediates: Any
) -> Callable[..., Any]:
    """Returns what `apply` computes, as a function of the arrays that it takes."""
    rules, super_apply = module.module_rules, module.wrapped_class.apply
    options = {
        "method": method,
        "mutable": mutable,
        "capture_intermediates": capture_intermediates,
    }

    def applied(variables: Any, args: Any, kwargs: Any, rngs: Any) -> Any:
        visit = _Visit(rules, variables)

        def fun(variables: Any, args: Any, kwargs: Any, rngs: Any) -> Any:
            with nn.intercept_methods(visit):
                results = super_apply(module, variables, *args, rngs=rngs, **options, **kwargs)
            if mutable is False:
                return rules.policy.cast_to_output(results)
            return rules.policy.cast_to_output(results[0]), results[1]

        results = rules.autocast(fun)(_widened(variables), args, kwargs, rngs)
        message = visit.message_of_unused()
        if message:
            warnings.warn(message, stacklevel=2)
        if mutable is not False and "params" in results[1]:
            stored = _tree.like(results[1]["params"], variables["params"])
            return results[0], {**results[1], "params": stored}
        return results

    return applied


def _is_own(module: Any, method: Any) -> bool:
    """Whether a function is one of a module's class, and not made anew for each call."""
    return getattr(type(module), getattr(method, "__name__", ""), None) is method


@functools.lru_cache(maxsize=1024)
def _wrapped_class(cls: type, rules: ModuleRules) -> Any:
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "wrapped_class": cls,
        "module_rules": rules,
    }
    return type(cls)(cls.__name__, (_Wrapped, cls), namespace)


def _rewrap(module: nn.Module, rules: ModuleRules) -> Any:
    return _wrapped_class(type(module), rules)(**_fields(module))


class _Visit:
    """Sees every call of a module's method: puts it into a scope of the module's policy.

    Attributes:
        rules: the policies.
        leaves: the parameters of each module alone, by path and name.
        seen: each module and what was found for it, by path.
    """

    def __init__(self, rules: ModuleRules, variables: Any) -> None:
        self.rules = rules
        self.leaves = _leaves_by_module(variables)
        self.seen: dict[str, tuple[nn.Module, Found]] = {}
        self._active = [rules.policy]

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a method, as `nn.intercept_methods` asks for."""
        policy, outer = self._find(context.module).policy, self._active[-1]
        if policy == outer or self.rules.is_float32:
            return next_fun(*args, **kwargs)
        self._active.append(policy)
        try:
            with policy_scope(policy):
                return narrowed_output(policy, outer, next_fun(*args, **kwargs))
        finally:
            self._active.pop()

    def _find(self, module: nn.Module) -> Found:
        path = "/".join(module.path)
        if path not in self.seen:
            parent = self._find(module.parent) if isinstance(module.parent, nn.Module) else None
            names = [f"{path}/{name}" for name in self.leaves.get(path, {})]
            found = self.rules.find(path, module, own_dtype(module), names, parent)
            self.seen[path] = (module, found)
        return self.seen[path][1]

    def message_of_unused(self) -> str | None:
        """Returns what to tell people about rules that hold for nothing; None if all hold."""
        modules = {path: module for path, (module, _) in self.seen.items()}
        leaves = [f"{path}/{name}" for path, own in self.leaves.items() for name in own]
        unused = self.rules.unused(modules, leaves)
        if not unused:
            return None
        return self.rules.message_of_unused(unused, modules, map(type, modules.values()))

    def stored(self, variables: Any) -> Any:
        """Returns variables with each parameter in the dtype that its module's policy stores."""
        if "params" not in variables:
            return variables

        def store(name: str, leaf: Any) -> Any:
            path = name.rpartition("/")[0]
            while path and path not in self.seen:
                path = path.rpartition("/")[0]
            module, found = self.seen.get(path, (None, None))
            own = own_param_dtype(module)
            policy = self.rules.policy if found is None else found.policy
            return _tree.cast_leaf(leaf, policy.param_dtype if own is None else own)

        return {**variables, "params": _tree.map_named(store, variables["params"])}


def _leaves_by_module(variables: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path, leaf in traverse_util.flatten_dict(nn.unbox(variables.get("params", {}))).items():
        found.setdefault("/".join(path[:-1]), {})[path[-1]] = leaf
    return found


def _widened(variables: Any) -> Any:
    """Widens parameters in half: a model written for f32 is to see f32."""
    if "params" not in variables:
        return variables
    return {**variables, "params": _tree.cast_floats(variables["params"], FLOAT32)}


def _register(cls: type, data_fields: tuple[str, ...]) -> None:
    def to_state_dict(obj: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(obj, name)) for name in data_fields}

    def from_state_dict(target: Any, state: dict[str, Any]) -> Any:
        missing = sorted(set(data_fields) - set(state))
        unknown = sorted(set(state) - set(data_fields))
        if missing or unknown:
            raise ValueError(
                f"The state dict of a {cls.__name__} lacks {missing or 'nothing'} and has unknown "
                f"fields {unknown or 'none'}. Restore into a target made as the saved one was."
            )
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name)
            for name in data_fields
        }
        return _tree.replace_state(target, **restored)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict, override=True)


_register(NoOpLossScale, ())
_register(GradientNames, ())
_register(StaticLossScale, ())
_register(DynamicLossScale, ("loss_scale", "counter", "hysteresis_left", "skip_streak"))
_register(ProductState, ("history", "scale"))
_register(TrainState, tuple(field.name for field in dataclasses.fields(TrainState)))
