"""What a script's `fit` and `save` do in a task that is not there to train.

One script serves every role. An evaluator's call of `fit` is answered by something else than
training, and what it saves would be in the way of the chief's files.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_answer: Callable[..., Any] | None = None


def answer_fit_with(function: Callable[..., Any] | None) -> None:
    """Lets `function(model, **arguments)` answer every `fit` of this process; None: no more."""
    global _answer
    _answer = function


def trains() -> bool:
    """Whether this process trains, and writes what it saves."""
    return _answer is None


def fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fit` that is answered as this process is there for."""
    signature = inspect.signature(inspect.unwrap(original))

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _answer is None:
            return original(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        return _answer(self, **arguments)

    return fit
