"""Layers: plain `nnx.Module`s with keyword arguments, no global configuration, no mesh needed.

Helpers live in submodules: `audio`, `cache`, `describe`, `distillation`, `matmul`, `mixer`, `mtp`, `norm`, `per_layer`,
`quantized`, `remat`, `router`, `stack`, `tree` and `vision`.
"""

import inspect as _inspect
from typing import Any as _Any

from flax import nnx as _nnx

from maxlib.nn import audio as audio
from maxlib.nn import cache as cache
from maxlib.nn import describe as describe
from maxlib.nn import distillation as distillation
from maxlib.nn import matmul as matmul
from maxlib.nn import mixer as mixer
from maxlib.nn import mtp as mtp
from maxlib.nn import norm as norm
from maxlib.nn import per_layer as per_layer
from maxlib.nn import quantized as quantized
from maxlib.nn import remat as remat
from maxlib.nn import router as router
from maxlib.nn import stack as stack
from maxlib.nn import tree as tree
from maxlib.nn import vision as vision
from maxlib.nn._capture import capture as capture
from maxlib.nn._capture import named_values as named_values
from maxlib.nn._capture import patch as patch
from maxlib.nn._draw import draw as draw
from maxlib.nn._heads import EmbeddingHead as EmbeddingHead
from maxlib.nn._heads import ScoreHead as ScoreHead
from maxlib.nn._heads import is_last_token as is_last_token
from maxlib.nn._heads import pool as pool
from maxlib.nn._heads import unit_vectors as unit_vectors
from maxlib.nn._heads import with_head as with_head
from maxlib.nn._linear import MLP as MLP
from maxlib.nn._linear import Einsum as Einsum
from maxlib.nn._linear import Embed as Embed
from maxlib.nn._linear import GatedMLP as GatedMLP
from maxlib.nn._linear import draw_key as draw_key
from maxlib.nn._ngrams import NgramEmbedding as NgramEmbedding
from maxlib.nn._ngrams import NgramHash as NgramHash
from maxlib.nn._patching import with_dropout as with_dropout
from maxlib.nn._pytree import pytree as pytree
from maxlib.nn._pytree import static as static
from maxlib.nn._streams import GatedResidual as GatedResidual
from maxlib.nn._streams import HyperConnection as HyperConnection
from maxlib.nn._streams import HyperHead as HyperHead
from maxlib.nn.attention._block_sparse import BlockSparseAttention as BlockSparseAttention
from maxlib.nn.attention._compressed import CompressedAttention as CompressedAttention
from maxlib.nn.attention._cross import CrossAttention as CrossAttention
from maxlib.nn.attention._grouped_query import Attention as Attention
from maxlib.nn.attention._grouped_query import TemperatureTuning as TemperatureTuning
from maxlib.nn.attention._grouped_query import attend as attend
from maxlib.nn.attention._index_loss import IndexLoss as IndexLoss
from maxlib.nn.attention._latent import MLA as MLA
from maxlib.nn.attention._shared_kv import SharedKVAttention as SharedKVAttention
from maxlib.nn.attention._sparse import SparseMLA as SparseMLA
from maxlib.nn.decoder._context import Context as Context
from maxlib.nn.decoder._context import Encoded as Encoded
from maxlib.nn.decoder._context import make_context as make_context
from maxlib.nn.decoder._decoder import Decoder as Decoder
from maxlib.nn.decoder._encoder import Encoder as Encoder
from maxlib.nn.decoder._encoder import EncoderInput as EncoderInput
from maxlib.nn.decoder._encoder import Source as Source
from maxlib.nn.decoder._encoder import check_source as check_source
from maxlib.nn.decoder._head import ROWS_AT_ONCE as ROWS_AT_ONCE
from maxlib.nn.decoder._head import cross_entropy as cross_entropy
from maxlib.nn.decoder._head import head_gradient as head_gradient
from maxlib.nn.decoder._head import head_split as head_split
from maxlib.nn.decoder._head import token_log_probs as token_log_probs
from maxlib.nn.decoder._model import Input as Input
from maxlib.nn.decoder._model import InputCall as InputCall
from maxlib.nn.decoder._model import Layer as Layer
from maxlib.nn.decoder._model import Model as Model
from maxlib.nn.decoder._model import MultimodalModel as MultimodalModel
from maxlib.nn.decoder._model import Output as Output
from maxlib.nn.decoder._model import residual as residual
from maxlib.nn.decoder._positions import ALiBi as ALiBi
from maxlib.nn.decoder._positions import LearnedPositions as LearnedPositions
from maxlib.nn.decoder._positions import RelativeBias as RelativeBias
from maxlib.nn.decoder._positions import SinusoidalPositions as SinusoidalPositions
from maxlib.nn.describe import summary as summary
from maxlib.nn.experts._linear import ExpertLinear as ExpertLinear
from maxlib.nn.experts._moe import MoE as MoE
from maxlib.nn.mixer import SequenceMixer as SequenceMixer
from maxlib.nn.mixer import with_attention as with_attention
from maxlib.nn.mixer import with_mask as with_mask
from maxlib.nn.norm import LayerNorm as LayerNorm
from maxlib.nn.norm import RMSNorm as RMSNorm
from maxlib.nn.recurrent._delta_net import GatedDeltaNet as GatedDeltaNet
from maxlib.nn.recurrent._kda import KimiDeltaAttention as KimiDeltaAttention
from maxlib.nn.recurrent._mamba2 import Mamba2 as Mamba2
from maxlib.nn.recurrent._short_conv import ShortConvolution as ShortConvolution
from maxlib.nn.router import HashRouter as HashRouter
from maxlib.nn.router import Router as Router
from maxlib.nn.stack import Stack as Stack
from maxlib.nn.stack import unstack as unstack
from maxlib.nn.tree import cast as cast
from maxlib.nn.tree import combine as combine
from maxlib.nn.tree import num_parameters as num_parameters
from maxlib.nn.tree import partition as partition
from maxlib.nn.tree import variables as variables


class _InitSignature:
    """Class attribute `__signature__`: the arguments of the class's own `__init__`, which flax's metaclass hides.

    Without it `help(nn.Attention)`, `nn.Attention?` and the tooltips of notebooks show `(*args, **kwargs)`. Subclasses
    inherit the attribute and show their own arguments; an instance shows those of `__call__`.
    """

    def __get__(self, instance: _Any, owner: type) -> _inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        signature = _inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


for _layer in _nnx.Module.__subclasses__():
    if _layer.__module__.startswith("maxlib."):
        _layer.__signature__ = _InitSignature()  # pyright: ignore[reportAttributeAccessIssue]
