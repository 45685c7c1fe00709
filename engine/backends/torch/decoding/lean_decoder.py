"""The forward pass of a Llama-like decoder with few kernel calls, for sampling on a CPU.

A decoder of `transformers` calls about 60 small kernels per layer. With one row of a small model, these take more time
than the matrix products. This pass computes the same function with about 20: the layers of the same input are one
product with packed weights, which also adds the residual, and a norm and the rotation take 4 and 3 calls. The results
differ from those of transformers by rounding only. The pass has no gradient, so the trainer does not use it.

`torch.nn.functional.linear` in bfloat16 packs the weights again at every call. On one core of an AMD EPYC with
avx512_bf16 and the matrices of SmolLM2-135M, a product with packed weights takes 0.5 times as long at 1 row, 0.6 times
at 8 and 0.85 times at 64; in float32, where torch calls MKL, 0.4 to 0.7 times. With one row, the time is that of
reading the weights: oneDNN's kernel reads 7 to 14 GB/s, and the kernel of `embedding_bag` (FBGEMM's), which prefetches,
16 to 20 GB/s. The sum of the rows of a matrix, weighted by x, is the product of x with the matrix. So bfloat16 weights
have a second form for one row, which is made when the first row comes alone.

Axes: B row · T token of a row · N token of all rows · H hidden · h query head · k key/value head · D head dimension
· I input feature · O output feature of all layers · G group of output features · F output feature of a group
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.backends.torch.attention import Layout
from engine.backends.torch.causal_lm import CausalLM

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` in config.json of the decoders that have the form of this pass."""

GROUP = 64
"""Output features of a group. The form for one row has the weights of a group one after the other in memory."""


class Hidden(NamedTuple):
    """The output, under the name that transformers' decoders give it."""

    last_hidden_state: Tensor


def can_be_lean(model: CausalLM, dtype: torch.dtype) -> bool:
    """Whether `LeanModel` computes what this model computes with weights of this dtype, on this machine."""
    config: Any = model.decoder.config
    known = config.model_type in MODEL_TYPES and getattr(config, "sliding_window", None) is None
    return known and not model.scalar and can_pack(dtype, model.device)


def packed_nbytes(model: CausalLM, dtype: torch.dtype, *, copied: bool) -> int:
    """Bytes that a `LeanModel` adds to the weights of the model, or to a copy of them in this dtype."""
    head = model.head.weight
    tied = head is model.module.get_input_embeddings().weight  # type: ignore[operator]
    linear = sum(layer.weight.numel() for layer in model.decoder.modules() if isinstance(layer, nn.Linear))
    added = linear + head.numel()
    if copied:  # the packed weights take the place of the copied ones, except an embedding's
        added = head.numel() if tied else 0
    if has_one_row_form(dtype):
        added += linear + head.numel()
    return added * dtype.itemsize


class LeanModel:
    """A model for sampling only, with packed weights."""

    def __init__(self, model: CausalLM) -> None:
        """Packs the model's weights. It must be one for which `can_be_lean` is true."""
        self._decoder, self._head = LeanDecoder(model.decoder), PackedLinear([model.head])
        # A shallow copy has the model's methods, with another decoder and another head.
        lean: Any = copy.copy(model)
        lean.decoder, lean.head = self._decoder, self._head
        self.model: CausalLM = lean
        # The names of the packed layers, by which those of another module are found.
        names = {id(layer): name for name, layer in model.module.named_modules()}
        self._packed = [*self._decoder.packed_linears(), self._head]
        self._names = [[names[id(layer)] for layer in packed.layers] for packed in self._packed]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, in all their forms."""
        return sum(packed.nbytes for packed in self._packed)

    def free_layers(self) -> None:
        """Frees the weights of the model's linear layers. A head that is tied to the embedding keeps its weight."""
        embedding = self._decoder.get_input_embeddings()
        for packed in self._packed:
            for layer in packed.layers:
                if layer.weight is not embedding.weight:
                    layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def pack(self, module: nn.Module) -> None:
        """Takes the linear weights of a module of the same architecture, in any dtype. The weights of the norms come
        from the model itself, which must have the module's already."""
        for packed, names in zip(self._packed, self._names, strict=True):
            layers: Any = [module.get_submodule(name) for name in names]
            packed.pack(layers)
        self._decoder.copy_norms()


class LeanDecoder:
    """The forward pass of a decoder of transformers. It shares the decoder's embedding, and has copies of all other
    weights."""

    def __init__(self, decoder: nn.Module) -> None:
        module: Any = decoder
        self.config = module.config
        self._embedding: nn.Embedding = module.get_input_embeddings()
        self._rotary: Any = module.rotary_emb
        self._norm = _Norm(module.norm)
        self._layers = [_Layer(layer) for layer in module.layers]

    def get_input_embeddings(self) -> nn.Embedding:
        return self._embedding

    def packed_linears(self) -> list[PackedLinear]:
        """The linear layers, whose weights must be packed again when the decoder's have changed."""
        packed = []
        for layer in self._layers:
            packed += [layer.qkv, layer.output, layer.gate_up, layer.down]
        return packed

    def copy_norms(self) -> None:
        """Copies the norms' weights again, when the decoder's have changed."""
        self._norm.copy_weight()
        for layer in self._layers:
            for norm in layer.norms:
                norm.copy_weight()

    def __call__(
        self,
        *,
        position_ids: Tensor,
        layout: Layout,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = False,
    ) -> Hidden:
        """Takes the arguments of transformers' decoders that `CausalLM.hidden` gives."""
        hidden_BTH = self._embedding(input_ids) if inputs_embeds is None else inputs_embeds
        # The rotation is x * cos + rotate_half(x) * sin, where rotate_half(x) is (-x2, x1) for the halves (x1, x2) of a
        # head. A roll by half a head gives (x2, x1), and the sign goes to the sine.
        cos_BTD, sin_BTD = self._rotary(hidden_BTH, position_ids)
        half = cos_BTD.shape[-1] // 2
        sin_BTD = torch.cat((-sin_BTD[..., :half], sin_BTD[..., half:]), dim=-1)
        cos_N1D, sin_N1D = cos_BTD.flatten(0, 1).unsqueeze(1), sin_BTD.flatten(0, 1).unsqueeze(1)
        rows, tokens, _ = hidden_BTH.shape
        hidden_NH = hidden_BTH.flatten(0, 1)
        for index, layer in enumerate(self._layers):
            hidden_NH = layer.forward(index, hidden_NH, cos_N1D, sin_N1D, layout, (rows, tokens))
        return Hidden(self._norm(hidden_NH).unflatten(0, (rows, tokens)))


class _Norm:
    """An RMSNorm, computed by LayerNorm's kernel: the numbers x and -x together have mean 0 and the variance
    mean(x²). There is one kernel for LayerNorm on a CPU, and none for RMSNorm."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm
        self._size = int(norm.weight.shape[0])
        self._eps = float(norm.variance_epsilon)
        self.copy_weight()

    def copy_weight(self) -> None:
        weight = self._norm.weight.detach()
        self._scale = torch.cat((weight, torch.zeros_like(weight)))

    def __call__(self, x: Tensor) -> Tensor:
        both = torch.cat((x, x.neg()), dim=-1)
        return torch.native_layer_norm(both, (2 * self._size,), self._scale, None, self._eps)[0][..., : self._size]


class _Layer:
    """One layer of the decoder: attention and MLP, each after a norm and with a residual."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = PackedLinear([attention.o_proj])
        self.gate_up = PackedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = PackedLinear([mlp.down_proj])
        self._scaling, self._head = float(attention.scaling), int(attention.head_dim)
        self._query_heads = attention.q_proj.out_features // self._head
        self._key_heads = attention.k_proj.out_features // self._head
        self._activation, self._intermediate = mlp.act_fn, int(mlp.gate_proj.out_features)
        self._before_attention, self._before_mlp = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.norms = [self._before_attention, self._before_mlp]
        self._head_norms: tuple[_Norm, _Norm] | None = None
        if hasattr(attention, "q_norm"):
            self._head_norms = (_Norm(attention.q_norm), _Norm(attention.k_norm))
            self.norms += self._head_norms

    def forward(
        self, index: int, x_NH: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, layout: Layout, shape: tuple[int, int]
    ) -> Tensor:
        # Project and rotate the queries and keys together.
        heads = self._query_heads + self._key_heads
        qkv_NhD = self.qkv(self._before_attention(x_NH)).unflatten(1, (-1, self._head))
        qk_NhD, value_NkD = qkv_NhD[:, :heads], qkv_NhD[:, heads:]
        if self._head_norms is not None:
            of_query, of_key = self._head_norms
            queries, keys = qk_NhD[:, : self._query_heads], qk_NhD[:, self._query_heads :]
            qk_NhD = torch.cat((of_query(queries), of_key(keys)), dim=1)
        rolled_NhD = qk_NhD.roll(self._head // 2, -1)
        qk_NhD = torch.addcmul(qk_NhD * cos_N1D, rolled_NhD, sin_N1D)

        # Attend.
        qk_BhTD = qk_NhD.unflatten(0, shape).transpose(1, 2)
        query_BhTD, key_BkTD = qk_BhTD[:, : self._query_heads], qk_BhTD[:, self._query_heads :]
        value_BkTD = value_NkD.unflatten(0, shape).transpose(1, 2)
        attended_BThD = layout.attend(index, query_BhTD, key_BkTD, value_BkTD, self._scaling)
        x_NH = self.output.add_to(x_NH, attended_BThD.flatten(0, 1).flatten(1))

        # The MLP with its gate.
        gate_up_NI = self.gate_up(self._before_mlp(x_NH))
        gate_NI, up_NI = gate_up_NI[:, : self._intermediate], gate_up_NI[:, self._intermediate :]
        return self.down.add_to(x_NH, self._activation(gate_NI).mul_(up_NI))


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes products with packed weights of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def has_one_row_form(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype have a second form for one row."""
    return dtype == torch.bfloat16 and "fbgemm" in torch.backends.quantized.supported_engines


@lru_cache(maxsize=64)
def _bags(groups: int, inputs: int) -> tuple[Tensor, Tensor]:
    """(rows, first row of each group): a group has `inputs` neighbouring rows."""
    rows = torch.arange(groups * inputs, dtype=torch.int32)
    return rows, rows[::inputs].contiguous()


class PackedLinear:
    """The outputs of some linear layers of the same input, side by side."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Packs the layers' weights. Later changes of those have no effect until `pack` is called."""
        self.layers = tuple(layers)
        self.out_features = sum(layer.out_features for layer in layers)
        self.pack(layers)

    def pack(self, layers: Sequence[nn.Linear]) -> None:
        """Packs the weights of layers of the same shapes, which may have another dtype."""
        dtype = self.layers[0].weight.dtype
        weight_OI = torch.cat([layer.weight.detach().to(dtype) for layer in layers])
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        self._one_row_GIF: Tensor | None = None
        self._one_row_allowed = has_one_row_form(dtype)
        self._bias_O: Tensor | None = None
        if any(layer.bias is not None for layer in layers):
            biases = []
            for layer in layers:
                bias_O = layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
                biases.append(bias_O.to(dtype))
            self._bias_O = torch.cat(biases)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, and of their form for one row, which may not be in memory yet."""
        return self._packed.nbytes * (2 if self._one_row_allowed else 1)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if len(x_NI) == 1 and self._one_row_allowed:
            return self._of_one_row(x_NI)
        output_NO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_NI, self._packed, self._bias_O, "none", [], "")
        return output_NO

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """`residual_NO` plus the outputs."""
        if len(x_NI) == 1 and self._one_row_allowed:
            return self._of_one_row(x_NI).add_(residual_NO)
        output_NO: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x_NI, residual_NO, self._packed, self._bias_O, "add"
        )
        return output_NO

    def _of_one_row(self, x_1I: Tensor) -> Tensor:
        if self._one_row_GIF is None:
            weight_OI = self._packed.to_dense()
            padded_OI = nn.functional.pad(weight_OI, (0, 0, 0, -self.out_features % GROUP))
            self._one_row_GIF = padded_OI.unflatten(0, (-1, GROUP)).transpose(1, 2).contiguous()
        groups, inputs, _ = self._one_row_GIF.shape
        rows, first_G = _bags(groups, inputs)
        scale = x_1I.expand(groups, -1).flatten()
        weight_RF = self._one_row_GIF.flatten(0, 1)
        output_GF = torch.embedding_bag(weight_RF, rows, first_G, False, 0, False, scale)[0]
        output_1O = output_GF.view(1, -1)[:, : self.out_features]
        return output_1O if self._bias_O is None else output_1O + self._bias_O
