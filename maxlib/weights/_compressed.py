"""Writes quantized weights as compressed-tensors, the format that transformers, vLLM and SGLang read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from maxlib import nn
from maxlib.nn import sites
from maxlib.weights._saving import Source, take_array, write_tensors
from maxlib.weights._table import Table
from maxlib.weights.files import Header
from maxlib.weights.mapping import Tensor

_BITS = {"int4": 4, "int8": 8, "float8_e4m3fn": 8}
_unpacked = jax.jit(nn.quantized.unpack, static_argnums=1)


@dataclass(frozen=True)
class _Form:
    """How a matrix is stored.

    Attributes:
        qtype: Type of its values.
        group: Number of inputs that share a scale; None for all.
        has_zeros: True if each scale has a zero point.
        activations: Type of the activations.
    """

    qtype: str
    group: int | None
    has_zeros: bool
    activations: str | None

    @property
    def format(self) -> str:
        """Returns the name of the format in config.json."""
        if self.qtype == "float8_e4m3fn":
            return "float-quantized"
        return "pack-quantized" if self.activations is None else "int-quantized"

    def settings(self, targets: list[str]) -> dict[str, Any]:
        """Returns the entry of config.json for modules of this form."""
        shared = {"num_bits": _BITS[self.qtype], "type": "int" if "int" in self.qtype else "float"}
        shared["symmetric"] = not self.has_zeros
        weights = shared | {"strategy": "channel" if self.group is None else "group", "group_size": self.group}
        activations = None if self.activations is None else shared | {"strategy": "token", "dynamic": True}
        return {
            "targets": targets,
            "weights": weights | {"dynamic": False},
            "input_activations": activations,
            "output_activations": None,
            "format": self.format,
        }


def plain(model: Any) -> Any:
    """Returns the shapes of a model with plain weights instead of quantized ones."""

    def restore(path: str, site: Any) -> Any:
        quantized = isinstance(site.w, nn.quantized.QuantizedWeight)
        return sites.replace(site, w=site.w.restored()) if quantized else site

    return jax.eval_shape(lambda model: sites.map_sites(model, restore), model)


def write_compressed(
    model: Any, table: Table, directory: Path, *, dtype: Any, max_shard_bytes: int
) -> tuple[np.dtype, dict[str, Any]]:
    """Writes the safetensors of a model with quantized weights.

    Args:
        model: The model.
        table: Its weight table.
        directory: An existing, empty directory.
        dtype: The dtype of scales and of plain floating weights; None keeps that of the plain weights.
        max_shard_bytes: Maximum size of a file, unless a single tensor is larger.

    Returns:
        The dtype of the plain weights, and the `quantization_config` for config.json.

    Raises:
        ValueError: For weights that the format cannot store; names their tensors.
    """
    writer = _Writer(model, table, dtype)
    write_tensors(writer.headers(), writer.tensor, directory, max_shard_bytes)
    return writer.dtype, writer.quantization()


class _Writer:
    """The tensors of a model in compressed-tensors' layout, made on demand."""

    def __init__(self, model: Any, table: Table, dtype: Any):
        matmuls = sites.find(model, sites.SITES)
        self._layers = {f"{p}.w": site for p, site in matmuls if isinstance(site.w, nn.quantized.QuantizedWeight)}
        if not self._layers:
            raise ValueError("the model has no quantized weights: save_pretrained without quantized= writes plain ones")
        self._arrays = {path: v.get_value() for path, v in nn.variables(model).items()}
        abstract = plain(model)
        self.dtype = np.dtype(dtype or next(iter(self._layers.values())).w.dtype)
        self._plain = Source(abstract, table, dtype, self._array)
        # float32 has all values of eight bits.
        self._values = Source(abstract, table, np.float32, self._factor("values"))
        self._scales = Source(abstract, table, np.float32, self._factor("scale"))
        self._zeros = Source(abstract, table, np.float32, self._factor("zeros"))
        tensors = self._plain.plan.tensors
        self.forms = {name: form for name, tensor in tensors.items() if (form := self._form(tensor)) is not None}
        unwritten = [str(c.hf_names) for c in self._plain.plan.conversions if c.place.path in self._layers]
        if unwritten:
            raise ValueError(
                f"{unwritten[0]} is computed from a quantized weight, which compressed-tensors cannot store"
            )

    def _array(self, path: str, value: Any, index: int | None) -> Any:
        return take_array(path, self._arrays[path], index)

    def _factor(self, name: str):
        def take(path: str, value: Any, index: int | None) -> np.ndarray:
            w = self._layers[path].w
            factor = take_array(path, getattr(w, name).get_value(), index)
            if name == "values":
                factor = _unpacked(jnp.asarray(factor), w.qtype) if w.qtype in nn.quantized.FOUR_BITS else factor
            elif w.group is not None:
                factor = jnp.repeat(factor, w.group, axis=-1)
            shape = w.shape if index is None else w.shape[1:]
            return np.asarray(jnp.broadcast_to(factor.astype(jnp.float32), shape))

        return take

    def _form(self, tensor: Tensor) -> _Form | None:
        """Returns the form of a tensor; None for one that is not quantized."""
        layers = [self._layers.get(piece.place.path) for piece in tensor.pieces]
        if not any(layers):
            return None
        forms = set()
        for layer in layers:
            rounds = getattr(getattr(layer, "matmul", None), "format", None)
            has_zeros = layer is not None and layer.w.zeros is not None
            forms.add(layer and _Form(layer.w.qtype, layer.w.group, has_zeros, rounds and rounds.activations))
        if len(forms) > 1 or None in forms:
            raise ValueError(f"{tensor.name} must be quantized in one format, got {', '.join(map(str, forms))}")
        (form,) = forms
        assert form is not None
        if form.qtype not in _BITS or len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
            raise ValueError(
                f"{tensor.name} of shape {tensor.shape} in {form.qtype} cannot be written: compressed-tensors stores "
                f"matrices of linear layers in {', '.join(_BITS)}. maxlib.quantization.save writes every format"
            )
        if form.group is not None and tensor.shape[1] % form.group:
            raise ValueError(f"{tensor.name}: groups of {form.group} must divide its {tensor.shape[1]} inputs")
        return form

    def headers(self) -> list[Header]:
        """Lists the tensors to write."""
        headers = []
        for header in self._plain.headers():
            form = self.forms.get(header.name)
            if form is None:
                headers.append(header)
                continue
            O, I = header.shape
            name, groups = header.name, 1 if form.group is None else I // form.group
            if form.format == "pack-quantized":
                headers.append(Header(f"{name}_packed", np.dtype(np.int32), (O, -(-I * _BITS[form.qtype] // 32))))
                headers.append(Header(f"{name}_shape", np.dtype(np.int64), (2,)))
            else:
                headers.append(Header(name, _numpy_dtype(form.qtype), (O, I)))
            headers.append(Header(f"{name}_scale", self.dtype, (O, groups)))
            if form.has_zeros:  # packed along the outputs
                words = (-(-O * _BITS[form.qtype] // 32), groups)
                headers.append(Header(f"{name}_zero_point", np.dtype(np.int32), words))
        return headers

    def tensor(self, name: str) -> np.ndarray:
        """Returns one of the tensors to write."""
        of, _, suffix = name.removesuffix("_point").rpartition("_")
        if name in self.forms:
            return self._values.tensor(name).astype(_numpy_dtype(self.forms[name].qtype))
        if of not in self.forms:
            return self._plain.tensor(name)
        if suffix == "shape":
            return np.array(self._plain.plan.tensors[of].shape, np.int64)
        form = self.forms[of]
        if suffix == "packed":
            return _packed(self._values.tensor(of), _BITS[form.qtype])
        factor = (self._zeros if suffix == "zero" else self._scales).tensor(of)
        groups = factor.reshape(len(factor), -1, form.group or factor.shape[1])  # [O, I] -> [O, G, g]
        if (groups != groups[..., :1]).any():
            raise ValueError(
                f"{of} has scales that are shared by outputs, not by inputs: maxlib.quantization.save writes every format"
            )
        if suffix == "zero":
            points = np.ascontiguousarray(groups[..., 0].T)  # [O, G] -> [G, O]
            return np.ascontiguousarray(_packed(points, _BITS[form.qtype]).T)
        return groups[..., 0].astype(self.dtype)

    def quantization(self) -> dict[str, Any]:
        """Returns `quantization_config`."""
        names: dict[_Form, list[str]] = {}
        for name, form in self.forms.items():
            names.setdefault(form, []).append(name.removesuffix(".weight"))
        tensors = self._plain.plan.tensors
        matrices = [
            n for n, t in tensors.items() if len(t.shape) == 2 and n not in self.forms and n.endswith(".weight")
        ]
        ignore = dict.fromkeys([*(name.removesuffix(".weight") for name in matrices), "lm_head"])
        groups = {
            f"group_{n}": form.settings(["Linear"] if len(names) == 1 else modules)
            for n, (form, modules) in enumerate(names.items())
        }
        formats = {form.format for form in names}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [name for name in ignore if f"{name}.weight" not in self.forms],
            "kv_cache_scheme": None,
        }


def _numpy_dtype(qtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, qtype, qtype))


def _packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs numbers `O I` of 4 or 8 bits, plus half of their range, into int32 words."""
    per_word = 32 // bits
    codes = (values + (1 << bits - 1)).astype(np.uint8)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    return (codes if bits == 8 else nn.quantized.pack(codes)).view("<i4")
