"""The rotary position embedding of a model, read once from either form of config.json.

    old form    rope_theta at the top, and rope_scaling: null or {"rope_type" (or "type"): …, "factor": …}
    new form    rope_parameters: {"rope_type": …, "rope_theta": …, …}

Both forms at once must agree. A base frequency is never guessed: a model run with 10,000 instead of its 1,000,000
writes fluent nonsense. Refused by name: types that are not in ROPE_TYPES, partial rotary, parameters by layer type,
and keys of the rope object that nothing here reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tileinfer_core.config_fields import Fields
from tileinfer_core.errors import DamagedModelError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_IGNORED = {"finetuned"}  # written by old exporters, read by nobody


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Names as in config.json; fields that a type does not use keep their defaults.

    `type` "dynamic" stretches the base only for sequences longer than max_position_embeddings, which TileInfer
    never makes; up to there it is exactly "default".
    """

    type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(config: Fields, where: str, max_position_embeddings: int) -> RopeConfig:
    """Read the rotary embedding of a config.

    Raises:
        DamagedModelError: no base frequency, two that differ, or a value out of range.
        UnsupportedModelError: a type or an option that TileInfer doesn't have, by its name.
    """
    table = _rope_object(config, where)
    _refuse_partial(config, where)
    rope = Fields(table, f"{where}: rope")
    _refuse_partial(rope, where)
    kind = _rope_type(rope, where)
    theta = _agreeing(config, rope, "rope_theta", where, low=1.01, high=1e15)  # YaRN divides by log(theta)
    if theta is None:
        raise DamagedModelError(
            f"{where}: no rope_theta, neither at the top nor in rope_parameters; its value can't be guessed"
        )
    result = _read_type(kind, theta, rope, _original(config, rope, where, max_position_embeddings))
    unknown = [name for name in rope.unread if name not in _IGNORED]
    if unknown:
        raise UnsupportedModelError(
            f"{where}: the rope options {', '.join(unknown)} of type {kind!r} are not supported",
            hint=f"supported rope types: {', '.join(ROPE_TYPES)}",
        )
    return result


def _rope_object(config: Fields, where: str) -> Mapping[str, Any]:
    """rope_parameters or rope_scaling; an error when both are there and differ in a key that both have."""
    tables: list[dict[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        value = config.raw(name)
        if value is not None and not isinstance(value, dict):
            raise config.error(name, "an object or null", value)
        if value:
            tables.append(_with_one_type_key(value, where, name))
    if len(tables) == 2:
        new, old = tables
        for key in new.keys() & old.keys():
            if new[key] != old[key]:
                raise DamagedModelError(
                    f"{where}: rope_parameters and rope_scaling differ: {key} is {new[key]!r} and {old[key]!r}"
                )
        return {**old, **new}
    return tables[0] if tables else {}


def _with_one_type_key(table: dict[str, Any], where: str, name: str) -> dict[str, Any]:
    """The same object with the old key `type` renamed to `rope_type`."""
    nested = sorted(key for key, value in table.items() if isinstance(value, dict))
    if nested:
        raise UnsupportedModelError(f"{where}: {name} differs by layer type ({', '.join(nested)}): not supported")
    old, new = table.get("type"), table.get("rope_type")
    if old is not None and new is not None and old != new:
        raise DamagedModelError(f"{where}: {name} has rope_type {new!r} and type {old!r}")
    rest = {key: value for key, value in table.items() if key not in ("type", "rope_type")}
    kind = new if new is not None else old
    return rest if kind is None else {**rest, "rope_type": kind}


def _rope_type(rope: Fields, where: str) -> str:
    kind = rope.string("rope_type", default="default")
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{where}: the rope type {kind!r} is not supported", hint=f"supported rope types: {', '.join(ROPE_TYPES)}"
        )
    return kind


def _refuse_partial(fields: Fields, where: str) -> None:
    for name in ("partial_rotary_factor", "rotary_pct"):
        value = fields.optional_number(name, low=0, high=1)
        if value not in (None, 1.0):
            raise UnsupportedModelError(f"{where}: partial rotary embedding ({name} {value}) is not supported")


def _agreeing(config: Fields, rope: Fields, name: str, where: str, *, low: float, high: float) -> float | None:
    """A number that may be given at the top, in the rope object, or in both with the same value."""
    top = config.optional_number(name, low=low, high=high)
    nested = rope.optional_number(name, low=low, high=high)
    if top is not None and nested is not None and top != nested:
        raise DamagedModelError(f"{where}: {name} is {top:g} at the top and {nested:g} in the rope object")
    return nested if top is None else top


def _original(config: Fields, rope: Fields, where: str, max_position_embeddings: int) -> int:
    """original_max_position_embeddings; where no one gives it, max_position_embeddings, as in Transformers."""
    given = _agreeing(config, rope, "original_max_position_embeddings", where, low=1, high=1 << 28)
    return max_position_embeddings if given is None else int(given)


def _read_type(kind: str, theta: float, rope: Fields, original: int) -> RopeConfig:
    def number(name: str, default: float | None = None) -> float:
        return rope.number(name, low=1e-6, high=1e6, default=default)

    if kind == "default":
        rope.raw("factor")  # stored beside the default type by some exporters, without effect
        return RopeConfig(kind, theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, factor=number("factor"))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise rope.error("high_freq_factor", f"greater than low_freq_factor ({low:g})", high)
        return RopeConfig(kind, theta, number("factor"), low, high, original)
    return RopeConfig(
        kind,
        theta,
        number("factor"),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor", low=1e-6, high=1e6),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale", low=0, high=1e6),
        mscale_all_dim=rope.optional_number("mscale_all_dim", low=0, high=1e6),
        truncate=rope.boolean("truncate", default=True),
    )
