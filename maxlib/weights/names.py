"""Names that most Hugging Face models share: parts of a layer's table, which a family combines, and the table around
its layers.

    decoder_table([*NORMS, *ATTENTION, *MLP, Weight("mlp.own.weight", "own.w")])

Entries of a layer are relative to it. Parameters that a model lacks (biases, head norms, an untied head) are skipped.
"""

import dataclasses
import re
from collections.abc import Sequence

from maxlib.weights._table import Convert, Copy, Entry, Ignore, Weight

_PARTS = ("gate", "up", "down")
_PER_EXPERT = re.compile(r"\{e\}\.\w+\.weight$")


def linear(hf_name: str, path: str) -> list[Weight]:
    """Lists a weight and a bias with the same axes in the file and in the model."""
    return [Weight(f"{hf_name}.weight", f"{path}.w"), Weight(f"{hf_name}.bias", f"{path}.b")]


def layer_norm(hf_name: str, path: str) -> list[Weight]:
    """Lists the scale and the bias of a LayerNorm."""
    return [Weight(f"{hf_name}.weight", f"{path}.scale"), Weight(f"{hf_name}.bias", f"{path}.bias")]


def heads(hf_name: str, path: str) -> list[Weight]:
    """Lists the weight and the bias of a projection to heads, such as queries."""
    return [
        Weight(f"{hf_name}.weight", f"{path}.w", "(N H) D -> N H D"),
        Weight(f"{hf_name}.bias", f"{path}.b", "(N H) -> N H"),
    ]


def heads_out(hf_name: str, path: str) -> list[Weight]:
    """Lists the weight and the bias of the projection of all heads together."""
    return [Weight(f"{hf_name}.weight", f"{path}.w", "D (N H) -> D N H"), Weight(f"{hf_name}.bias", f"{path}.b")]


def qkv(hf_name: str, path: str, rows: str = "(three N H)") -> list[Weight]:
    """Lists the projections to queries, keys and values, which files have in one tensor.

    Args:
        hf_name: Name of the layer in files.
        path: Path of the attention.
        rows: Axes of the rows; by default all queries, then all keys, then all values.
    """
    table = []
    for n, part in enumerate("qkv"):
        table.append(Weight(f"{hf_name}.weight", f"{path}.{part}.w", f"{rows} D -> N H D", {"three": n}))
        table.append(Weight(f"{hf_name}.bias", f"{path}.{part}.b", f"{rows} -> N H", {"three": n}))
    return table


def gate_up(hf_name: str, path: str) -> list[Weight]:
    """Lists the gate and the up projection of an MLP, which files have in one tensor, the gate first."""
    table = []
    for n, part in enumerate(("gate", "up")):
        table.append(Weight(f"{hf_name}.weight", f"{path}.{part}.w", "(two F) D -> F D", {"two": n}))
        table.append(Weight(f"{hf_name}.bias", f"{path}.{part}.b", "(two F) -> F", {"two": n}))
    return table


def attention(hf_name: str, path: str, *, out: str) -> list[Weight]:
    """Lists the projections of attention, each in a tensor of its own.

    Args:
        hf_name: The file's name of the projections to queries, keys and values, with `{}` for q, k or v.
        path: Path of the attention.
        out: The file's name of the projection of all heads.
    """
    parts = [entry for part in "qkv" for entry in heads(hf_name.replace("{}", part), f"{path}.{part}")]
    return [*parts, *heads_out(out, f"{path}.o")]


def mlp(hf_name: str, path: str) -> list[Weight]:
    """Lists the weights and biases of a gated MLP; `hf_name` has `{}` for gate, up or down."""
    return [entry for part in _PARTS for entry in linear(hf_name.replace("{}", part), f"{path}.{part}")]


def experts(hf_name: str, parts: Sequence[str] = _PARTS) -> list[Weight]:
    """Lists experts with a tensor each.

    Args:
        hf_name: The file's name of a projection, with `{e}` for the expert, and `{}` for its name.
        parts: The file's names of gate, up and down.
    """
    return [
        Weight(hf_name.replace("{}", name) + ".weight", f"moe.{part}.w", "O I -> e O I")
        for name, part in zip(parts, _PARTS, strict=True)
    ]


def norms(**hf_names: str) -> list[Weight]:
    """Lists the scales of norms, by their path, with the file's names."""
    return [Weight(f"{hf_name}.weight", f"{path}.scale") for path, hf_name in hf_names.items()]


# Norms before each branch.
NORMS = (*norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),)
# The same as LayerNorms.
LAYER_NORMS = (
    *layer_norm("input_layernorm", "attn_norm"),
    *layer_norm("post_attention_layernorm", "mlp_norm"),
)
# Norms before and after each branch.
SANDWICH_NORMS = (
    *norms(attn_norm="input_layernorm", attn_post_norm="post_attention_layernorm"),
    *norms(mlp_norm="pre_feedforward_layernorm", mlp_post_norm="post_feedforward_layernorm"),
)
ATTENTION = (
    *attention("self_attn.{}_proj", "attn", out="self_attn.o_proj"),
    Weight("self_attn.q_norm.weight", "attn.q_norm.scale"),
    Weight("self_attn.k_norm.weight", "attn.k_norm.scale"),
)
MLP = (*mlp("mlp.{}_proj", "mlp"),)
# Experts with one tensor each, and a router that may have an expert_bias ...
EXPERTS = (
    Weight("mlp.gate.weight", "moe.router.gate.w"),
    Weight("mlp.gate.e_score_correction_bias", "moe.router.expert_bias"),
    *experts("mlp.experts.{e}.{}_proj"),
)
# ... and shared experts, as DeepSeek calls them.
MOE = (*EXPERTS, *mlp("mlp.shared_experts.{}_proj", "moe.shared"))
# One shared expert with a gate, as Qwen2-MoE and the families after it call it.
GATED_SHARED_EXPERT = (
    *mlp("mlp.shared_expert.{}_proj", "moe.shared"),
    Weight("mlp.shared_expert_gate.weight", "moe.shared_gate.w"),
)
# Gated DeltaNet with Qwen's names, without the projections of its input; the layer's attribute is `delta`.
LINEAR_ATTENTION = (
    Weight("linear_attn.A_log", "delta.a_log"),
    Weight("linear_attn.dt_bias", "delta.dt_bias"),
    Weight("linear_attn.norm.weight", "delta.norm.scale"),
    Weight("linear_attn.out_proj.weight", "delta.o.w", "D (N H) -> D N H"),
)
CONV1D = "linear_attn.conv1d.weight", "delta.{}_conv", "one W"  # of `queries_keys_values`


def with_fused_experts(table: Sequence[Entry]) -> list[Entry]:
    """Names experts as transformers 5 stores them, in two parameters per layer, if `table` has one tensor per expert.

    Args:
        table: A whole table.
    """
    experts = [e for e in table if isinstance(e, Weight) and _PER_EXPERT.search(e.hf_name)]
    gated = any(e.path.endswith(".gate.w") for e in experts)
    return [_fused(e, gated=gated) if e in experts else e for e in table]


def _fused(entry: Weight, *, gated: bool) -> Weight:
    """Returns the entry for all experts together instead of one per expert: gate and up in one tensor, and down."""
    stem = entry.hf_name.partition(".{e}.")[0].replace("block_sparse_moe", "mlp")
    part = entry.path.split(".")[-2]
    if part == "down" or not gated:
        return Weight(f"{stem}.{part}_proj", entry.path, "e O I -> e O I")
    at = {"two": _PARTS.index(part)}
    return Weight(f"{stem}.gate_up_proj", entry.path, "e (two O) I -> e O I", at=at)


def fused_experts(model: str) -> list[Convert]:
    """Lists all experts of a layer in two tensors, an alternative to `EXPERTS` in some files.

    Args:
        model: Prefix of the layers' names. Add the list to a whole table.
    """
    return _fused_experts(f"{model}.layers.{{i}}", "layers.{i}")


def _fused_experts(hf_name: str, path: str) -> list[Convert]:
    parts = (
        ("gate_up_proj", "gate", lambda both: both[:, : both.shape[1] // 2]),
        ("gate_up_proj", "up", lambda both: both[:, both.shape[1] // 2 :]),
        ("down_proj", "down", lambda weight: weight),
    )
    return [
        Convert((f"{hf_name}.mlp.experts.{name}",), f"{path}.moe.{part}.w", load, batch=1, dtype=None)
        for name, part, load in parts
    ]


def gated_attention(head_dim: int) -> list[Weight]:
    """Lists `ATTENTION` with an output gate, which Qwen stores in `q_proj`: each head's query, then its gate."""
    table = [entry for entry in ATTENTION if ".q_proj." not in entry.hf_name]
    for part, row in (("q", 0), ("gate", head_dim)):
        table += [
            Weight("self_attn.q_proj.weight", f"attn.{part}.w", "(N R) D -> N R D", at={"R": row}),
            Weight("self_attn.q_proj.bias", f"attn.{part}.b", "(N R) -> N R", at={"R": row}),
        ]
    return table


def queries_keys_values(
    hf_name: str, path: str, axes: str, *, keys: tuple[int, int], values: tuple[int, int]
) -> list[Weight]:
    """Lists the parts of a tensor that has all queries, then all keys, then all values along its first dimension.

    Args:
        hf_name: Name of the tensor.
        path: Path of the three leaves, with `{}` for q, k or v.
        axes: The other axes of the tensor; "one" is an axis of size 1 that the leaves do not have.
        keys: Number of key heads, and their width.
        values: Number of value heads, and their width.
    """
    leaf_axes = axes.replace("one ", "")
    table, row, at = [], 0, {"one": 0} if "one" in axes else {}
    for part, (count, width) in (("q", keys), ("k", keys), ("v", values)):
        leaf = path.format(part)
        if keys[1] == values[1]:
            table.append(Weight(hf_name, leaf, f"(N R) {axes} -> N R {leaf_axes}", at | {"N": row // width}))
        else:  # heads of two widths: one by one
            pattern, starts = f"R {axes} -> N R {leaf_axes}", (row + n * width for n in range(count))
            table += [Weight(hf_name, leaf, pattern, at | {"R": start}, {"N": n}) for n, start in enumerate(starts)]
        row += count * width
    return table


def mamba2(hf_name: str, path: str, *, heads: int, inner: int, groups: int) -> list[Weight]:
    """Lists the weights of Mamba-2, which files store as one projection and one convolution.

    Args:
        hf_name: Name of the layer.
        path: Path of the `nn.Mamba2`.
        heads: Number of heads.
        inner: Width of all heads together.
        groups: Size of `b` in all groups together.
    """
    table = [Weight(f"{hf_name}.{name}", f"{path}.{name.lower()}") for name in ("A_log", "dt_bias", "D")]
    table += [Weight(f"{hf_name}.norm.weight", f"{path}.norm.scale"), *linear(f"{hf_name}.out_proj", f"{path}.o")]
    row = 0
    for part, size in (("gate", inner), ("x", inner), ("b", groups), ("c", groups), ("dt", heads)):
        table.append(Weight(f"{hf_name}.in_proj.weight", f"{path}.{part}.w", "R D -> R D", {"R": row}))
        table.append(Weight(f"{hf_name}.in_proj.bias", f"{path}.{part}.b", "R -> R", {"R": row}))
        row += size
    row = 0
    for part, size in (("x", inner), ("b", groups), ("c", groups)):
        taps = "R one W -> R W", {"R": row, "one": 0}
        table.append(Weight(f"{hf_name}.conv1d.weight", f"{path}.{part}_conv", *taps))
        table.append(Weight(f"{hf_name}.conv1d.bias", f"{path}.{part}_conv_bias", "R -> R", {"R": row}))
        row += size
    return table


def mla(q_rank: int | None, nope_dim: int) -> list[Weight]:
    """Lists the weights of latent attention with DeepSeek's names.

    Args:
        q_rank: Size of the latent of queries; None if they have none.
        nope_dim: Number of a key head's dimensions that are not rotated.
    """
    kv, split = "self_attn.kv_b_proj.weight", "(N H) R -> N H R"
    return [
        Weight(f"self_attn.{'q_proj' if q_rank is None else 'q_b_proj'}.weight", "attn.q_up.w", split),
        Weight("self_attn.q_a_proj.weight", "attn.q_down.w"),
        Weight("self_attn.q_a_layernorm.weight", "attn.q_norm.scale"),
        Weight("self_attn.kv_a_proj_with_mqa.weight", "attn.kv_down.w"),
        Weight("self_attn.kv_a_layernorm.weight", "attn.kv_norm.scale"),
        # Each head's rows: nope_dim of its key, then those of its value.
        Weight(kv, "attn.k_up.w", split, at={"H": 0}),
        Weight(kv, "attn.v_up.w", split, at={"H": nope_dim}),
        Weight("self_attn.o_proj.weight", "attn.o.w", "D (N H) -> D N H"),
    ]


def under(entries: Sequence[Weight], hf_name: str, path: str) -> list[Weight]:
    """Adds a prefix to both sides of `entries`."""
    return [dataclasses.replace(e, hf_name=f"{hf_name}.{e.hf_name}", path=f"{path}.{e.path}") for e in entries]


def decoder_table(
    layer: Sequence[Weight],
    *,
    prefix: str = "",
    model: str = "model",
    embed: str = "embed_tokens",
    layers: str = "layers",
    norm: str = "norm",
    head: str = "lm_head",
) -> list[Entry]:
    """Makes the table of an `nn.Decoder`.

    Args:
        layer: Entries of one layer, relative to it.
        prefix: Prefix of all of the file's names.
        model: Next part of all names except the head's.
        embed: The file's name of the embedding.
        layers: The file's name of the layers.
        norm: The file's name of the norm before the head.
        head: The file's name of the head.
    """
    head, model = f"{prefix}{head}.weight", f"{prefix}{model}"
    embed, layers = f"{model}.{embed}.weight", f"{model}.{layers}.{{i}}"
    return [
        Weight(embed, "embed.w"),
        *under(layer, layers, "layers.{i}"),
        *layer_norm(f"{model}.{norm}", "norm"),
        Weight(head, "head.w"),
        Copy(head, of=embed),
        Ignore(f"{layers}.self_attn.rotary_emb.inv_freq"),
    ]


def mtp_table(layer: Sequence[Weight], *, first: int, used: int, stored: int, tied: bool) -> list[Entry]:
    """Makes the table of the modules of a decoder's `mtp`, which are numbered as further layers and duplicate shared
    tensors.

    Args:
        layer: Entries of a module's block, relative to it.
        first: The file's layer index of the first module, which is the number of layers.
        used: Number of modules of the model.
        stored: Number of modules in its files; those that the model does not have are skipped.
        tied: True if the head is the embedding.
    """
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    table: list[Entry] = [Ignore(f"model.layers.{first + depth}.*") for depth in range(used, stored)]
    for depth in range(used):
        hf_name, path = f"model.layers.{first + depth}", f"mtp.{depth}"
        table += [
            Weight(f"{hf_name}.enorm.weight", f"{path}.embed_norm.scale"),
            Weight(f"{hf_name}.hnorm.weight", f"{path}.hidden_norm.scale"),
            Weight(f"{hf_name}.eh_proj.weight", f"{path}.project.w"),
            *under(layer, hf_name, f"{path}.block"),
            Weight(f"{hf_name}.shared_head.norm.weight", f"{path}.norm.scale"),
            Copy(f"{hf_name}.embed_tokens.weight", of="model.embed_tokens.weight"),
            Copy(f"{hf_name}.shared_head.head.weight", of=head),
        ]
    return table


def qwen_mtp_table(layer: Sequence[Weight], *, used: int) -> list[Entry]:
    """Makes the table of the single module of Qwen's models from Qwen3-Next on, stored as `mtp.*`.

    Args:
        layer: Entries of its block, relative to it.
        used: 1 if the model has the module; otherwise its tensors are skipped.
    """
    if not used:
        return [Ignore("mtp.*")]
    return [
        Weight("mtp.pre_fc_norm_embedding.weight", "mtp.0.embed_norm.scale"),
        Weight("mtp.pre_fc_norm_hidden.weight", "mtp.0.hidden_norm.scale"),
        Weight("mtp.fc.weight", "mtp.0.project.w"),
        *under(layer, "mtp.layers.0", "mtp.0.block"),
        *_fused_experts("mtp.layers.0", "mtp.0.block"),
        Weight("mtp.norm.weight", "mtp.0.norm.scale"),
    ]
