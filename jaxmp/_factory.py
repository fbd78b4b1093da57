"""Loads a program that a command line names: `train.py:make_step`."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from jaxmp._errors import did_you_mean
from jaxmp.policy import Policy

_RETURNS = (
    "A factory returns (function, args) or (function, args, kwargs), where args is a tuple and "
    "kwargs a dict"
)
# Arguments of `jaxmp.audit` itself, which a keyword argument of the program would collide with.
_RESERVED = ("fun", "target", "policy", "float32", "timeout")


class UsageError(Exception):
    """The command line names something that is not there, or not what it has to be."""


class Program(NamedTuple):
    """A function and what it is called with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_factory(text: str) -> Callable[..., Any]:
    """Imports the factory that `MODULE:FACTORY` names.

    The current folder is importable, and so is the module's own, as when it is run as a script.

    Args:
        text: MODULE is a dotted name (`examples.gpt`) or a path (`examples/gpt.py`).

    Raises:
        UsageError: if there is no such module or function in it. What the module itself raises
            passes through.
    """
    module_text, colon, name = text.rpartition(":")
    if not (colon and module_text and name.isidentifier()):
        raise UsageError(f"{text!r} is not MODULE:FACTORY. Write it as in 'train.py:make_step'.")
    _make_importable(os.getcwd(), first=True)
    is_path = module_text.endswith(".py") or "/" in module_text or os.sep in module_text
    module = _import_path(module_text) if is_path else _import_name(module_text)
    factory = getattr(module, name, None)
    if callable(factory):
        return factory
    names = [key for key, value in vars(module).items() if _is_candidate(module, key, value)]
    what = "has no function" if factory is None else f"has a {type(factory).__name__}, no function,"
    listed = f" It has {', '.join(names[:10])}." if names else ""
    hint = did_you_mean(name, names) or listed
    raise UsageError(f"Module {module_text!r} {what} {name!r}.{hint}")


def _is_candidate(module: ModuleType, name: str, value: Any) -> bool:
    is_own = getattr(value, "__module__", None) == module.__name__
    return callable(value) and is_own and not name.startswith("_")


def _import_path(text: str) -> ModuleType:
    path = Path(text).resolve()
    if not path.is_file():
        raise UsageError(
            f"No file {text!r} in {os.getcwd()!r}. Use the path of a Python file, or a dotted name."
        )
    _make_importable(str(path.parent), first=True)
    # Its own name, so that its siblings can import it back, unless a library has that name.
    name = path.stem if path.stem not in sys.modules else f"_audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{text!r} is no Python file. Use a path that ends in '.py'.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up there
    spec.loader.exec_module(module)
    return module


def _import_name(name: str) -> ModuleType:
    missing = UsageError(
        f"No module {name!r} in {os.getcwd()!r} or among the installed packages. Use a dotted "
        "name such as 'examples.gpt', or a path such as 'examples/gpt.py'."
    )
    if not all(part.isidentifier() for part in name.split(".")):
        raise missing
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A package on the way may itself lack something: that is not this name's fault.
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise missing from None
        raise
    if spec is None:
        raise missing
    if spec.has_location and spec.origin:
        # Last, for a package may hold a `types.py`, which must not hide the library's.
        _make_importable(str(Path(spec.origin).parent), first=False)
    return importlib.import_module(name)


def _make_importable(folder: str, *, first: bool) -> None:
    if folder not in sys.path:
        sys.path.insert(0 if first else len(sys.path), folder)


def make_program(factory: Callable[..., Any], policy: Policy | None) -> Program:
    """Calls a factory, with `policy=` if it has a parameter of that name.

    Raises:
        UsageError: if the factory needs other arguments or returns something else.
    """
    name = getattr(factory, "__name__", repr(factory))
    made = factory(**_arguments(factory, name, policy))
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise UsageError(f"{name!r} returned a {type(made).__name__}{size}. {_RETURNS}.")
    function, args, kwargs = (*made, {})[:3]
    if not callable(function):
        raise UsageError(f"{name!r} returned a {type(function).__name__} as function. {_RETURNS}.")
    if not isinstance(args, tuple):
        raise UsageError(f"{name!r} returned a {type(args).__name__} as args. {_RETURNS}.")
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(f"{name!r} returned {kwargs!r} as kwargs. {_RETURNS}.")
    taken = [key for key in kwargs if key in _RESERVED]
    if taken:
        raise UsageError(
            f"{name!r} returned the keyword argument {taken[0]!r}, a name that jaxmp.audit takes "
            "for itself. Return a function that takes it under another name."
        )
    return Program(function, args, kwargs)


def _arguments(factory: Callable[..., Any], name: str, policy: Policy | None) -> dict[str, Policy]:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some builtins have none
        return {}
    wants_policy = "policy" in signature.parameters
    arguments = {"policy": policy} if wants_policy and policy is not None else {}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        remedy = "Wrap it in a function that takes no arguments, or only `policy`."
        if wants_policy and policy is None:
            remedy = "Give it a policy with --policy mixed_bfloat16, say."
        raise UsageError(f"{name!r} cannot be called: {error}. {remedy}") from None
    return arguments
