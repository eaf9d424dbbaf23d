"""Extensions of vLLM's methods where vLLM has no place for them: one of ours around each.

docs/upstream.md lists them all, with what would make each unnecessary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

MARK = "__sipipe__"
"""Attribute of a method that has been extended."""


def extends(
    owner: type | ModuleType, name: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that is called in the place of a method, with that method before its arguments.

    A method is extended once in a process, by the first function: vLLM may call its plugins several
    times.

    Args:
        owner: the class that has the method, or inherits it; or the module that has the function.
        name: the method's name. A class method stays one, and a property that is only read, too.
    """

    def put(extension: Callable[..., Any]) -> Callable[..., Any]:
        attribute = inspect.getattr_static(owner, name)
        method, kind = _function_of(attribute)
        if getattr(method, MARK, False):
            return extension

        @wraps(method)
        def extended(*args: Any, **kwargs: Any) -> Any:
            return extension(method, *args, **kwargs)

        setattr(extended, MARK, True)
        setattr(owner, name, kind(extended))
        return extension

    return put


def _function_of(attribute: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function behind a class's attribute, and what makes such an attribute of a function."""
    if isinstance(attribute, classmethod):
        return attribute.__func__, classmethod
    if isinstance(attribute, property):
        assert attribute.fget is not None
        return attribute.fget, property
    return attribute, lambda function: function
