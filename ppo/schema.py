"""Settings as frozen dataclasses: how a field is declared, checked and described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
ANY = "(-inf, inf)"


class InputError(ValueError):
    """What a person gave does not work. The message is one line, fit to print without traceback."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).splitlines()))


def setting(default: T, meaning: str, interval: str = "") -> T:
    """Declare a field by its default, its help text and, for numbers, the interval allowed."""
    return field(default=default, metadata={"meaning": meaning, "interval": interval})


def mapping(meaning: str, interval: str = "") -> Any:
    """Declare a field that maps names to values, by default none."""
    return field(default_factory=dict, metadata={"meaning": meaning, "interval": interval})


def default_of(declared: Field[Any]) -> Any:
    """The value of a field that is not given."""
    factory = declared.default_factory
    return declared.default if factory is MISSING else factory()


@cache
def settings_of(schema: Any) -> Mapping[str, tuple[Field[Any], Any]]:
    """Map each dotted key of a dataclass of settings to its field and its type."""
    return dict(_walk(schema, ""))


def expected(declared: Field[Any], hint: Any) -> str:
    """Describe the values that a field takes: `a number in [0, 1]`."""
    return _describe(hint, declared.metadata["interval"])


def check_value(key: str, value: object, declared: Field[Any], hint: Any) -> Any:
    """Return the value in the type of its field, or raise InputError with the key in it."""
    try:
        return _convert(value, hint, declared.metadata["interval"])
    except (ValueError, OverflowError):
        unquoted = hint in (str, str | None) and isinstance(value, (bool, int, float))
        raise InputError(
            f"{key} must be {expected(declared, hint)}, got {show(value)}"
            f"{' (put quotes around it)' if unquoted else ''}"
        ) from None


def show(value: object) -> str:
    """Write a value as YAML would, cut to a readable length."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _walk(cls: Any, prefix: str) -> Iterator[tuple[str, tuple[Field[Any], Any]]]:
    hints = get_type_hints(cls)
    for declared in fields(cls):
        if declared.metadata:
            yield prefix + declared.name, (declared, hints[declared.name])
        else:
            yield from _walk(hints[declared.name], f"{declared.name}.")


def check_section(section: Any, prefix: str = "") -> None:
    """Check each field and store it in its declared type (1 becomes 1.0, a list a tuple)."""
    hints = get_type_hints(type(section))
    for declared in fields(section):
        value = getattr(section, declared.name)
        if declared.metadata:
            value = check_value(prefix + declared.name, value, declared, hints[declared.name])
            object.__setattr__(section, declared.name, value)  # it is frozen for everyone else
        elif not isinstance(value, hints[declared.name]):
            wanted = hints[declared.name].__name__
            raise InputError(f"{declared.name} must be a {wanted}, got {show(value)}")


def _convert(value: Any, hint: Any, interval: str) -> Any:
    if get_origin(hint) is UnionType:
        hint, _ = get_args(hint)  # all unions here are `X | None`
        if value is None:
            return None
    if get_origin(hint) is dict and isinstance(value, Mapping):
        kinds = get_args(hint)
        return {
            _convert(key, kinds[0], ""): _convert(item, kinds[1], interval)
            for key, item in value.items()
        }
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        if get_args(hint)[-1] is ...:
            return tuple(_convert(item, get_args(hint)[0], interval) for item in value)
        items = zip(value, get_args(hint), strict=True)
        return tuple(_convert(item, kind, interval) for item, kind in items)
    if get_origin(hint) is Literal and isinstance(value, str) and value in get_args(hint):
        return value
    if hint is str and isinstance(value, str) and value.strip():
        return value
    if hint is bool and isinstance(value, bool):
        return value
    numeric = {int: (int,), float: (int, float)}
    if (
        isinstance(value, numeric.get(hint, ()))
        and not isinstance(value, bool)
        and _inside(value, interval)
    ):
        return hint(value)
    raise ValueError


def _inside(number: float, interval: str) -> bool:
    """Infinite ends are open, so infinities are outside; so is NaN, as no comparison holds."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = low < number or (low == number and interval[0] == "[")
    return above and (number < high or (number == high and interval[-1] == "]"))


def _describe(hint: Any, interval: str) -> str:
    if get_origin(hint) is UnionType:
        return f"{_describe(get_args(hint)[0], interval)} or null"
    if get_origin(hint) is dict:
        return 'names and numbers, such as {"module:function": 0.5}'
    if get_origin(hint) is tuple and get_args(hint)[-1] is ...:
        return 'a list of texts, such as ["Question:"]'
    if get_origin(hint) is tuple:
        return f"two numbers in {interval}, such as [0.9, 0.95]"
    if get_origin(hint) is Literal:
        *most, last = get_args(hint)
        return f"{', '.join(most)} or {last}"
    noun = {bool: "true or false", str: "text", int: "an integer", float: "a number"}[hint]
    low, _, high = interval[1:-1].partition(", ")
    if interval in ("", ANY):
        return f"{noun} that is finite" if interval else noun
    if high != "inf":
        return f"{noun} in {interval}"
    return f"{noun} {'>=' if interval[0] == '[' else '>'} {low}"
