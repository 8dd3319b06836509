"""Configurations that declare the config.json name of each field, so that the same lines read and write it.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(ModelConfig):
        model_types = ("llama",)
        architecture = "LlamaForCausalLM"
        fixed = {"hidden_act": "silu"}

        dim: int = hf("hidden_size")
        num_heads: int = hf("num_attention_heads")
        head_dim: int = hf("head_dim", absent=lambda c: c.dim // c.num_heads)
        rope: Rope = hf_rope()
        norm_eps: float = hf("rms_norm_eps", 1e-5, absent=1e-6)
        losses: tuple = ()  # declares no name in config.json: neither read nor written

Fields are read in the order of the class. `c` has the preceding fields, so that a default can be computed from them. A
dotted name is in a nested object: `hf("vision_config.hidden_size")`.
"""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from maxlib.weights._hf_config import REQUIRED, HFConfig

# A value, or a function of the fields read so far that returns it.
Default = Any


@dataclasses.dataclass(frozen=True)
class FieldCodec:
    """Reader and writer of a field in config.json.

    Attributes:
        read: `read(fields, c, hint)` returns the value; `hint` is the field's annotation.
        write: `write(value, cfg)` returns config.json's fields by dotted name.
        required: Names that config.json must have.
        check: `check(value, cfg)` raises ValueError for an invalid configuration.
        name: Its name in config.json, if it is stored under one name.
    """

    read: Callable[[HFConfig, Any, Any], Any]
    write: Callable[[Any, Any], Mapping[str, Any]]
    required: tuple[str, ...] = ()
    check: Callable[[Any, Any], None] = lambda value, cfg: None
    name: str = ""


class ModelConfig:
    """Base of a family's configuration, a frozen dataclass: `from_hf` reads config.json, `to_hf` writes it.

    Attributes:
        model_types: Values of `model_type` that the family reads; the first one is written.
        architecture: The class in transformers.
        fixed: Fields with the only value that the family supports; a tuple lists alternatives. They are also written.
        fixed_if_present: The same for fields that transformers may omit; never written.
        ignored: Names of fields without effect in this family. Say why in a comment.

    Raises TypeError where a subclass assigns another name without an annotation, since nothing would read it, and for
    an argument that is not a field; ValueError where `num_kv_heads` does not divide `num_heads`, and for what a field
    or the family refuses.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    architecture: ClassVar[str] = ""
    fixed: ClassVar[Mapping[str, Any]] = types.MappingProxyType({})
    fixed_if_present: ClassVar[Mapping[str, Any]] = types.MappingProxyType({})
    ignored: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _refuse_unknown(cls)

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        known = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
        if unknown := [name for name in fields if name not in known]:
            meant = _meant(unknown[0], cls, known)
            raise TypeError(f"{cls.__module__}.{cls.__name__} has no field {unknown[0]!r}; {meant}")
        return super().__new__(cls)

    def __post_init__(self):
        _check_heads(self)
        for name, codec in _codecs(type(self)).items():
            codec.check(getattr(self, name), self)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> Any:
        """Reads config.json. Raises ValueError for values that the family does not support."""
        if cls.model_types:
            fields.require("model_type", *cls.model_types)
        for name, allowed in (*cls.fixed.items(), *cls.fixed_if_present.items()):
            parent, last = _locate(fields, name)
            parent.require(last, *(allowed if isinstance(allowed, tuple) else (allowed,)))
        for name in cls.ignored:
            parent, last = _locate(fields, name)
            parent.ignore(last)
        return cls(**cls._read(fields))

    @classmethod
    def _read(cls, fields: HFConfig) -> dict[str, Any]:
        hints, so_far = typing.get_type_hints(cls), types.SimpleNamespace()
        for name, codec in _codecs(cls).items():
            setattr(so_far, name, codec.read(fields, so_far, hints[name]))
        return vars(so_far)

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of config.json. Raises ValueError for a rope that transformers' class does not have."""
        written: dict[str, Any] = {"architectures": [self.architecture]} if self.architecture else {}
        if self.model_types:
            written["model_type"] = self.model_types[0]
        _put(written, {name: a[0] if isinstance(a, tuple) else a for name, a in self.fixed.items()})
        for name, codec in _codecs(type(self)).items():
            _put(written, codec.write(getattr(self, name), self))
        return written

    @classmethod
    def required(cls) -> list[str]:
        """Returns the names of the fields that config.json must have."""
        return [name for codec in _codecs(cls).values() for name in codec.required]


def _check_heads(cfg: Any) -> None:
    """Raises ValueError if query heads cannot share key heads evenly, before a layer does from deep inside a trace."""
    heads, kv_heads = (getattr(cfg, name, None) for name in ("num_heads", "num_kv_heads"))
    if heads is not None and kv_heads is not None and (min(heads, kv_heads) < 1 or heads % kv_heads):
        raise ValueError(
            f"num_heads (num_attention_heads) must be a multiple of num_kv_heads (num_key_value_heads), and both at "
            f"least 1; got {heads} and {kv_heads}"
        )


def _refuse_unknown(cls: type) -> None:
    """Raises TypeError for a plain attribute that nothing reads: a misspelt `fixed`, or a field without annotation."""
    inherited = {name for base in cls.__mro__[1:] for name in (*vars(base), *inspect.get_annotations(base))}
    for name, value in vars(cls).items():
        described = callable(value) or hasattr(value, "__get__")  # methods, properties, nested classes
        if name.startswith("_") or name in inherited or name in inspect.get_annotations(cls) or described:
            continue
        readable = [] if isinstance(value, dataclasses.Field) else [one for one in inherited if one[0] != "_"]
        near = difflib.get_close_matches(name, readable, n=1)
        meant = f"did you mean {near[0]}?" if near else f"a field needs an annotation, `{name}: int = ...`"
        raise TypeError(f"{cls.__name__}.{name} has no effect: {meant}")


def _meant(name: str, cls: type, known: list[str]) -> str:
    """Suggests the field that `name` means: by config.json's name of it, or the closest."""
    near = [own for own, codec in _codecs(cls).items() if codec.name.split(".")[-1] == name]
    near = near or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"


def _codecs(cls: type) -> dict[str, FieldCodec]:
    fields = dataclasses.fields(typing.cast(Any, cls))
    return {field.name: field.metadata["hf"] for field in fields if "hf" in field.metadata}


def _locate(fields: HFConfig, name: str) -> tuple[HFConfig, str]:
    """Splits a dotted name into the object that has the field, and the field's name."""
    *parents, last = name.split(".")
    for parent in parents:
        fields = fields.nested(parent)
    return fields, last


def _put(target: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Adds fields by dotted name, creating nested objects as needed."""
    for name, value in fields.items():
        *parents, last = name.split(".")
        nested = target
        for parent in parents:
            nested = nested.setdefault(parent, {})
        nested[last] = value


def declare(codec: FieldCodec, default: Any, compare: bool = True) -> Any:
    """Returns a dataclass field that `codec` reads and writes."""
    return dataclasses.field(default=default, compare=compare, metadata={"hf": codec})


def hf(
    name: str,
    default: Any = dataclasses.MISSING,
    *,
    absent: Default = dataclasses.MISSING,
    null: Default = dataclasses.MISSING,
    same: tuple[str, ...] = (),
) -> Any:
    """Declares a field that config.json has under `name`.

    The annotation decides which values are accepted: bool, int, float, str or a tuple (a list there). With `| None`,
    null means None.

    Args:
        name: Name in config.json; dots separate nested objects.
        default: Default of the constructor.
        absent: Value if the config omits the field, or a function of the preceding fields; by default `default`.
            Without either the field is required.
        null: Value for null, or a function of the preceding fields; by default the same as for an absent field.
            `weights.REQUIRED` makes null an error.
        same: Other names of the same value in config.json. They must agree if given.
    """
    absent = default if absent is dataclasses.MISSING else absent
    absent = REQUIRED if absent is dataclasses.MISSING else absent

    def read(fields: HFConfig, c: Any, hint: Any) -> Any:
        parent, last = _locate(fields, name)
        kind, optional = _kind(hint)
        nullable = optional or null not in (dataclasses.MISSING, REQUIRED)
        if null is REQUIRED and last in parent:
            value = parent.take(last, kind=kind)
        else:
            value = parent.take(last, default_value(absent, c), kind=kind, nullable=nullable)
        if value is None and not optional:
            value = default_value(null, c)
        value = tuple(value) if kind is list and value is not None else value
        for other in same:
            where, it = _locate(fields, other)
            where.require(it, value)
        return value

    def write(value: Any, cfg: Any) -> dict[str, Any]:
        return dict.fromkeys((name, *same), list(value) if isinstance(value, tuple) else value)

    return declare(FieldCodec(read, write, (name,) if absent is REQUIRED else (), name=name), default)


def default_value(default: Default, c: Any) -> Any:
    """Returns a default, computed from the fields read so far if it is a function."""
    return default(c) if callable(default) else default


def _kind(hint: Any) -> tuple[type, bool]:
    """Returns the class of values that an annotation accepts (list for a tuple), and whether it accepts None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    first = next(option for option in options if option is not type(None))
    kind = typing.get_origin(first) or first
    return list if kind is tuple else kind, type(None) in options


def hf_fields(
    read: Callable[[HFConfig, Any], Any],
    write: Callable[[Any, Any], Mapping[str, Any]],
    *,
    default: Any = dataclasses.MISSING,
    compare: bool = True,
) -> Any:
    """Declares a field that is stored in several fields of config.json, or in another form.

    Args:
        read: `read(fields, c)` takes fields and returns the value; `c` has the preceding fields.
        write: `write(value, cfg)` returns config.json's fields.
        default: Default of the constructor.
        compare: True if the field takes part in comparisons of configurations.
    """
    return declare(FieldCodec(lambda fields, c, hint: read(fields, c), write), default, compare)
