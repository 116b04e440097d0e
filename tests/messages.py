"""What an error says: what was given, what is needed, what to write instead."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Message(NamedTuple):
    """A call that fails, and the three parts of its message."""

    error: type[Exception]
    call: Callable[[], Any]
    given: str
    needed: str
    cure: str


def check(message: Message) -> None:
    with pytest.raises(message.error) as raised:
        message.call()
    text = str(raised.value)
    for part in (message.given, message.needed, message.cure):
        assert part in text, f"{part!r} is not in {text!r}"
    assert len(text) < 1000, f"{len(text)} characters: {text}"
