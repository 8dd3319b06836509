"""The codec of a config.json: entries that say where it has each field of a configuration, read and written alike."""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxlib.weights._hf_config import REQUIRED, HFConfig

Values = Mapping[str, Any]
# A value, or a function of the configuration (of its fields read so far) that returns it.
Default = Any


def num_heads(c: Any) -> int:
    """Returns `num_heads`: what a null `num_key_value_heads` means, and in many families an absent one."""
    return c.num_heads


def equal_heads(c: Any) -> int:
    """Returns `dim / num_heads`: what a null `head_dim` means, and in many families an absent one.

    Raises ValueError if the heads do not divide the width.
    """
    if c.dim % c.num_heads:
        raise ValueError(
            f"num_attention_heads must divide hidden_size, or head_dim say how wide heads are, got {c.num_heads} heads "
            f"for {c.dim} without head_dim."
        )
    return c.dim // c.num_heads


# What null means in every family.
NULL: Mapping[str, Default] = {"num_key_value_heads": num_heads, "head_dim": equal_heads}


@dataclass(frozen=True)
class Field:
    """A field of the configuration that config.json has under one name.

    The annotation in the configuration decides which values are accepted: bool, int, float, str or a tuple (a list in
    config.json). With `| None`, null means None.

    Args:
        name: Name in the configuration.
        hf_name: Name in config.json, by default the same; dots separate nested objects.
    """

    name: str
    hf_name: str = ""

    def __post_init__(self):
        object.__setattr__(self, "hf_name", self.hf_name or self.name)


@dataclass(frozen=True)
class Computed:
    """A field that config.json stores in several fields, or in another form.

    Args:
        name: Name in the configuration.
        read: `read(hf, c)` takes fields from an `HFConfig` and returns the value; `c` has the preceding fields, and
            `model_type`.
        write: `write(value, cfg)` returns config.json's fields by dotted name.
    """

    name: str
    read: Callable[[HFConfig, Any], Any]
    write: Callable[[Any, Any], Values]


@dataclass(frozen=True)
class Fields:
    """How config.json spells a configuration, in both directions; `FIELDS` in `maxlib/models/llama.py` is a short one.

    Fields are read in the order of the entries. A field of the configuration without an entry is neither read nor
    written.

    Args:
        config: The configuration, a dataclass.
        entries: Where config.json has its fields.
        model_types: The values of `model_type` that are read, and the class of each in transformers; empty for a part
            of a config.json.
        model_type: Function from a configuration to the `model_type` to write; by default the first one.
        fixed: Fields with the only value that the family supports; a tuple lists alternatives, of which the first is
            written. A function of the configuration may compute them.
        fixed_if_present: The same for fields that transformers may omit; never written.
        ignored: Names of fields without effect in this family. Say why in a comment.
        absent: What it means if config.json omits a field: a value, a function of the preceding fields or
            `weights.REQUIRED`. By default the default of the configuration; a field without one is required.
        null: The same for null, which means by default what absence means, or what `NULL` says.

    Raises TypeError for an entry, `absent` or `null` of a name that the configuration does not have.
    """

    config: Any
    entries: Sequence[Field | Computed]
    model_types: Mapping[str, str] = field(default_factory=dict)
    model_type: Callable[[Any], str] | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    fixed_if_present: Values = field(default_factory=dict)
    ignored: Sequence[str] = ()
    absent: Mapping[str, Default] = field(default_factory=dict)
    null: Mapping[str, Default] = field(default_factory=dict)

    def __post_init__(self):
        known = [f.name for f in dataclasses.fields(self.config)]
        names = [entry.name for entry in self.entries]
        if unknown := {*names, *self.absent, *self.null} - {*known}:
            raise TypeError(f"{self.config} has no field {min(unknown)!r}; it has {', '.join(known)}")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise TypeError(f"each field must have one entry, got several for {', '.join(repeated)}")

    def read(self, hf: HFConfig) -> Any:
        """Reads a configuration. Raises ValueError for values that the family does not support."""
        cfg = self.config(**self.values(hf))
        self.check(hf, cfg)
        return cfg

    def values(self, hf: HFConfig) -> dict[str, Any]:
        """Reads the fields of the configuration by name, without building it; raises ValueError as `read` does."""
        c, hints = types.SimpleNamespace(), typing.get_type_hints(self.config)
        if self.model_types:
            c.model_type = hf.require("model_type", *self.model_types)
        for name in _present(hf, dict.fromkeys(self.ignored)):
            parent, last = _locate(hf, name)
            parent.ignore(last)
        for entry in self.entries:
            value = entry.read(hf, c) if isinstance(entry, Computed) else self._take(entry, hf, c, hints[entry.name])
            setattr(c, entry.name, value)
        return {entry.name: getattr(c, entry.name) for entry in self.entries}

    def check(self, hf: HFConfig, cfg: Any) -> None:
        """Raises ValueError if a fixed field has another value."""
        require(hf, self.fixed | _present(hf, self.fixed_if_present), cfg)

    def _take(self, entry: Field, hf: HFConfig, c: Any, hint: Any) -> Any:
        absent, null = self._absent(entry.name), self.null.get(entry.name, NULL.get(entry.hf_name, dataclasses.MISSING))
        parent, last = _locate(hf, entry.hf_name)
        kind, optional = _kind(hint)
        if null is REQUIRED and last in parent:
            value = parent.take(last, kind=kind)
        else:
            nullable = optional or null not in (dataclasses.MISSING, REQUIRED)
            is_stated = parent.take(last, None, kind=object) is not None
            default = REQUIRED if is_stated else _resolved(absent, c)  # a function may refuse the other fields
            value = parent.take(last, default, kind=kind, nullable=nullable)
        if value is None and not optional:
            value = _resolved(null, c)
        return tuple(value) if kind is list and value is not None else value

    def _absent(self, name: str) -> Default:
        default = next(f.default for f in dataclasses.fields(self.config) if f.name == name)
        return self.absent.get(name, REQUIRED if default is dataclasses.MISSING else default)

    def write(self, cfg: Any) -> dict[str, Any]:
        """Returns the fields of config.json. Raises ValueError for a rope that transformers' class does not have."""
        written: dict[str, Any] = {}
        if self.model_types:
            model_type = self.model_type(cfg) if self.model_type else next(iter(self.model_types))
            written = {"architectures": [self.model_types[model_type]], "model_type": model_type}
        put(written, first_of(self.fixed, cfg))
        for entry in self.entries:
            value = getattr(cfg, entry.name)
            if isinstance(entry, Computed):
                put(written, entry.write(value, cfg))
            else:
                put(written, {entry.hf_name: list(value) if isinstance(value, tuple) else value})
        return written

    @property
    def required(self) -> list[str]:
        """Returns the names of the fields that config.json must have."""
        return [e.hf_name for e in self.entries if isinstance(e, Field) and self._absent(e.name) is REQUIRED]


@dataclass(frozen=True)
class Multimodal:
    """How a config.json spells a model whose text is described in `text_config`, beside encoders of images or sound.

    Args:
        text: The text's fields.
        parts: The fields of each encoder by its name in the configuration: `Fields`, or any object with `write(value)`
            and `read(hf)`, which returns None for an encoder that the model lacks.
        model_types: Values of `model_type` that are read, and the class of each in transformers.
        model_type: Function from a configuration with encoders to the `model_type` to write; by default the first one.
        fixed: See `Fields`.
        fixed_if_present: See `Fields`.
        ignored: See `Fields`.
        tied: Meaning of an absent `tie_word_embeddings` beside `text_config`; None means what `text_config` says.
        text_alone: True if a config.json may also be that of a text model.
    """

    text: Fields
    parts: Mapping[str, Any]
    model_types: Mapping[str, str]
    model_type: Callable[[Any], str] | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    fixed_if_present: Values = field(default_factory=dict)
    ignored: Sequence[str] = ()
    tied: bool | None = None
    text_alone: bool = True

    def __post_init__(self):
        if self.text_alone:
            object.__setattr__(self, "model_types", {**self.text.model_types, **self.model_types})

    @property
    def config(self) -> Any:
        """Returns the class of the configuration."""
        return self.text.config

    def read(self, hf: HFConfig) -> Any:
        """Reads a configuration. Raises ValueError for values that the family does not support."""
        if hf.require("model_type", *self.model_types) in self.text.model_types:
            return self.text.read(hf)
        hf.ignore(*self.ignored)
        values = self.text.values(hf.nested("text_config"))
        if "tie_word_embeddings" not in self.ignored:
            values["tied"] = hf.take("tie_word_embeddings", values["tied"] if self.tied is None else self.tied)
        parts = {name: codec.read(hf) for name, codec in self.parts.items()}
        cfg = self.config(**values | parts)
        self.text.check(hf.nested("text_config"), cfg)
        require(hf, self.fixed | _present(hf, self.fixed_if_present), cfg)
        if any(part is not None for part in parts.values()):
            hf.require("model_type", self._type(cfg))
        return cfg

    def write(self, cfg: Any) -> dict[str, Any]:
        """Returns the fields of config.json. Raises ValueError for a rope that transformers' class does not have."""
        text, parts = self.text.write(cfg), {name: getattr(cfg, name) for name in self.parts}
        if all(part is None for part in parts.values()):
            return text
        model_type = self._type(cfg)
        del text["architectures"]
        written = {"architectures": [self.model_types[model_type]], "model_type": model_type}
        written |= {"text_config": text, "tie_word_embeddings": cfg.tied}
        for name, part in parts.items():
            put(written, {} if part is None else self.parts[name].write(part))
        put(written, first_of(self.fixed, cfg))
        return written

    @property
    def required(self) -> list[str]:
        """Returns the names of the fields that the text must have."""
        return self.text.required

    def _type(self, cfg: Any) -> str:
        if self.model_type is not None:
            return self.model_type(cfg)
        return next(name for name in self.model_types if name not in self.text.model_types)


def require(hf: HFConfig, values: Values, cfg: Any) -> None:
    """Takes fields whose values must be those of `values` for `cfg`, by dotted name; a tuple lists alternatives."""
    for name, value in values.items():
        allowed = _resolved(value, cfg)
        parent, last = _locate(hf, name)
        parent.require(last, *(allowed if isinstance(allowed, tuple) else (allowed,)))


def first_of(fixed: Values, cfg: Any) -> dict[str, Any]:
    """Returns the values of `fixed` that are written for a configuration."""
    values = {name: _resolved(value, cfg) for name, value in fixed.items()}
    return {name: value[0] if isinstance(value, tuple) else value for name, value in values.items()}


def put(target: dict[str, Any], values: Values) -> None:
    """Adds fields by dotted name, creating nested objects as needed, and merging those that exist."""
    for name, value in values.items():
        *parents, last = name.split(".")
        nested = target
        for parent in parents:
            nested = nested.setdefault(parent, {})
        if isinstance(value, dict) and isinstance(nested.get(last), dict):
            nested[last] |= value
        else:
            nested[last] = value


def _present(hf: HFConfig, values: Values) -> dict[str, Any]:
    """Leaves out fields of nested objects that config.json does not have."""
    return {
        name: value for name, value in values.items() if "." not in name or hf.take(name.split(".")[0], None, kind=dict)
    }


def _locate(hf: HFConfig, name: str) -> tuple[HFConfig, str]:
    """Splits a dotted name into the object that has the field, and the field's name."""
    *parents, last = name.split(".")
    for parent in parents:
        hf = hf.nested(parent)
    return hf, last


def _resolved(default: Default, c: Any) -> Any:
    return default(c) if callable(default) else default


def _kind(hint: Any) -> tuple[type, bool]:
    """Returns the class of values that an annotation accepts (list for a tuple), and whether it accepts None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    first = next(option for option in options if option is not type(None))
    kind = typing.get_origin(first) or first
    return list if kind is tuple else kind, type(None) in options
