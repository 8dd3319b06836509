"""How files spell GLM-5.3-Flash: fields of config.json, and names of weights."""

from typing import Any

from maxlib.models import _glm_vision as vision
from maxlib.models._sizes import hyper_connection, kimi_delta_attention
from maxlib.weights import Computed, HFConfig, Ignore, Table, Weight, names

LINEAR, INDEXED = "linear_attention", "indexed_attention"
NESTED = "linear_attn_config"  # where config.json may have the sizes of linear attention
TEXT = "model.language_model"  # before names of the text


def usual_types(num_layers: int) -> tuple[str, ...]:
    """Returns the types of layers of a config.json without them: every fourth is INDEXED."""
    return tuple(INDEXED if i % 4 == 3 else LINEAR for i in range(num_layers))


def linear(name: str, hf_name: str, nested_name: str, usual: int | float) -> Computed:
    """Makes the entry for a size of linear attention, which an object of its own may have."""

    def read(hf: HFConfig, c: Any) -> Any:
        value = hf.take(hf_name, usual, nullable=isinstance(usual, float))
        return hf.nested(NESTED).take(nested_name, value) if NESTED in hf else value

    return Computed(name, read, lambda value, cfg: {hf_name: value})


def _read_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    types = hf.layer_types(c.num_layers, LINEAR, INDEXED, "full_attention")
    types = types and tuple(INDEXED if kind == "full_attention" else kind for kind in types)
    chosen = hf.take("indexer_types", ["full"], kind=list)
    if {*chosen} != {"full"}:
        raise ValueError(f"{hf.where('indexer_types')} must be 'full' for all layers, got {chosen}")
    return None if types == usual_types(c.num_layers) else types


def _write_types(types: tuple[str, ...] | None, cfg: Any) -> dict[str, Any]:
    return {"layer_types": list(types or usual_types(cfg.num_layers)), "indexer_types": ["full"] * cfg.num_layers}


LAYER_TYPES = Computed("layer_types", _read_types, _write_types)


def _indexer(hf_name: str, path: str) -> list[Weight]:
    """Lists the weights of an indexer of pools."""
    return [
        Weight(f"{hf_name}.wq_b.weight", f"{path}.q.w", "(N H) R -> N H R"),
        Weight(f"{hf_name}.wk.weight", f"{path}.k.w"),
        *names.layer_norm(f"{hf_name}.k_norm", f"{path}.k_norm"),
        Weight(f"{hf_name}.weights_proj.weight", f"{path}.weight.w"),
        Weight(f"{hf_name}.index_kpool_compress_ape", f"{path}.place"),
        Weight(f"{hf_name}.index_kpool_compress_gate", f"{path}.gate.w"),
    ]


def table(cfg: Any) -> Table:
    """Maps the tensor names of the release to parameters; prediction modules are further layers, which are skipped."""
    layer = [
        *names.NORMS,
        *hyper_connection("hc_attn", "attn_streams"),
        *hyper_connection("hc_ffn", "mlp_streams"),
        *kimi_delta_attention("N -> N"),
        *names.mla(cfg.q_rank, cfg.nope_dim),
        *_indexer("self_attn.indexer", "attn.indexer"),
        *names.MLP,
        *names.MOE,
    ]
    return [*names.decoder_table(layer, model=TEXT), *vision.table(), Ignore(f"{TEXT}.layers.{cfg.num_layers}.*")]
