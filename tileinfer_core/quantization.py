"""Which modules of a model are INT8, by the quantization_config of its config.json, and what else is refused by name.

The layouts are compressed-tensors', as TileInfer and llm-compressor write them:

    <module>.weight         int8 [out, in] ("int-quantized"), or packed into int32 words by another name
                            ("pack-quantized", packed_int8.py); which of the two, the files themselves say
    <module>.weight_scale   [out, 1] with the strategy "channel", [out, in / group_size] with "group"

A weight is scale · int8, symmetric: there is no zero point. Activations that such a file wants quantised per token
(W8A8, dynamic) are computed at least as exactly here; the weights are the same. Everything else (fp8, awq, gptq,
4 bits, zero points, static activation scales …) changes what the tensors mean and is an UnsupportedModelError.

This file imports no array library: a model is refused before anything is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tileinfer_core.errors import DamagedModelError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD = "compressed-tensors"
PLAIN, PACKED = "int-quantized", "pack-quantized"
FORMATS = (PLAIN, "naive-quantized", PACKED)  # the first two are one layout
STATUSES = ("compressed", "frozen")  # a frozen model may be in half precision yet; its tensors are then refused
EMBEDDING_CLASS, LINEAR_CLASS = "Embedding", "Linear"
SUPPORTED = (
    "supported: INT8 weights, symmetric, one scale a row or a group, in the compressed-tensors layouts int-quantized "
    "and pack-quantized"
)


@dataclass(frozen=True, slots=True)
class Int8:
    """Symmetric INT8 with one scale for `group_size` neighbouring columns of a row; None: for the whole row."""

    group_size: int | None = None

    def groups(self, columns: int) -> int:
        """Scales of a row."""
        return 1 if self.group_size is None else columns // self.group_size

    def group(self, columns: int) -> int | None:
        """Columns of a scale; None where a row has one, be it by a group as long as the row."""
        return None if self.groups(columns) == 1 else self.group_size

    def __str__(self) -> str:
        return "one scale a row" if self.group_size is None else f"groups of {self.group_size}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a quantization_config says. `rules`: a target and its format, the most specific targets first."""

    rules: tuple[tuple[str, Int8], ...]
    ignore: tuple[str, ...] = ()
    quantised_activations: bool = False

    def of(self, module: str) -> Int8 | None:
        """The format of a module such as "model.layers.0.mlp.up_proj"; None: not quantised."""
        kind = EMBEDDING_CLASS if module.endswith("embed_tokens") else LINEAR_CLASS
        if any(_matches(target, module, kind) for target in self.ignore):
            return None
        return next((int8 for target, int8 in self.rules if _matches(target, module, kind)), None)


def read_quantization(section: object, where: str) -> Quantization | None:
    """The quantization_config of a config.json; None for a model that is not quantised.

    Raises:
        UnsupportedModelError: a method, format or option that TileInfer does not run, by name.
        DamagedModelError: a section that is not one.
    """
    if section is None or section == {}:
        return None
    if not isinstance(section, dict):
        raise DamagedModelError(f"{where}: quantization_config must be an object, found {_short(section)}")
    method = section.get("quant_method")
    if method != METHOD:
        raise _refused(where, f"weights quantised by {_short(method)} (quantization_config)")
    _refuse_sections(section, where)
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise DamagedModelError(f"{where}: quantization_config has no config_groups")
    rules: list[tuple[str, Int8]] = []
    for name, group in groups.items():
        int8 = _read_group(group, section.get("format"), f"{where}: config_groups.{name}")
        rules += [(target, int8) for target in _targets(group.get("targets"), f"{where}: config_groups.{name}.targets")]
    return Quantization(
        rules=tuple(sorted(rules, key=lambda rule: _vagueness(rule[0]))),
        ignore=_targets(section.get("ignore") or [], f"{where}: quantization_config.ignore"),
        quantised_activations=any(group.get("input_activations") for group in groups.values()),
    )


def _refuse_sections(section: Mapping[str, Any], where: str) -> None:
    status = section.get("quantization_status", "compressed")
    if status not in STATUSES:
        raise _refused(where, f"a checkpoint of quantization_status {_short(status)}, expected 'compressed'")
    sparsity = section.get("sparsity_config") or {}
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise _refused(where, "sparse weights (sparsity_config)")
    for name in ("kv_cache_scheme", "transform_config"):
        if section.get(name):
            raise _refused(where, f"a {name}")


def _read_group(group: Mapping[str, Any], format_of_all: object, where: str) -> Int8:
    layout = group.get("format") or format_of_all
    if layout not in FORMATS:
        raise _refused(where, f"the format {_short(layout)}")
    if group.get("output_activations"):
        raise _refused(where, "quantised outputs (output_activations)")
    inputs, weights = group.get("input_activations"), group.get("weights")
    if inputs is not None:
        _refuse_inputs(inputs, where)
    if not isinstance(weights, dict):
        raise DamagedModelError(f"{where} has no weights")
    return _read_weights(weights, where)


def _refuse_inputs(inputs: object, where: str) -> None:
    """Activations that are quantised while the model runs leave nothing in the files: ours are as exact or more."""
    if not isinstance(inputs, dict):
        raise DamagedModelError(f"{where}.input_activations must be an object, found {_short(inputs)}")
    if inputs.get("type", "int") != "int" or inputs.get("num_bits", 8) != 8:
        raise _refused(where, f"activations of {inputs.get('num_bits')} bits, {inputs.get('type')}")
    if inputs.get("dynamic") is not True:
        raise _refused(where, "static activation scales (input_activations without dynamic)")


def _read_weights(weights: Mapping[str, Any], where: str) -> Int8:
    if weights.get("type", "int") != "int" or weights.get("num_bits") != 8:
        raise _refused(where, f"weights of {_short(weights.get('num_bits'))} bits, type {_short(weights.get('type'))}")
    if weights.get("symmetric", True) is not True:
        raise _refused(where, "asymmetric weights (zero points)")
    if weights.get("dynamic", False) is not False:
        raise _refused(where, "dynamic weights")
    if weights.get("actorder") in ("group", "dynamic"):
        raise _refused(where, "columns in another order (actorder group)")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel" and size in (None, -1):
        return Int8()
    if strategy == "group" and type(size) is int and 8 <= size <= 1 << 16:
        return Int8(size)
    raise _refused(where, f"weights with the strategy {_short(strategy)}, group_size {_short(size)}")


def _targets(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(target, str) for target in value):
        raise DamagedModelError(f"{where} must be a list of names, found {_short(value)}")
    for target in value:
        if target.startswith("re:"):
            _check_pattern(target[3:], where)
    return tuple(value)


def _check_pattern(pattern: str, where: str) -> None:
    """A pattern comes from the file: one that could take for ever on a module's name is refused."""
    if len(pattern) > 500 or re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 4:
        raise _refused(where, f"the pattern {_short(pattern)}")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise DamagedModelError(f"{where}: {_short(pattern)} is not a regular expression: {error}") from None


def _matches(target: str, module: str, kind: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target in (module, kind)


def _vagueness(target: str) -> int:
    """compressed-tensors' order: names, then patterns, then classes."""
    return 1 if target.startswith("re:") else 2 if target in (LINEAR_CLASS, EMBEDDING_CLASS) else 0


def _refused(where: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{where}: not supported: {what}", hint=SUPPORTED)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
