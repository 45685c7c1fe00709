"""A decoder with a language head, as the trainer and the sampler use it: packed forward passes, logits and logprobs.

`engine.backends.torch.loading` reads it from a model folder.

Axes: B row · T packed token · N trained token · C trained token of one chunk · V vocabulary · H hidden
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.backends.torch.attention import Layout, PackedLayout
from engine.backends.torch.packing import Packed
from engine.backends.torch.token_logprobs import at_least_float32, token_logprobs, token_logprobs_and_entropy
from engine.errors import BadSpec
from engine.models.folder import CONTEXT_KEYS, UNKNOWN_CONTEXT, context_length_in
from engine.models.images import Images
from engine.text.errors import UnsupportedFragment

CHUNK_BYTES = 1 << 29
"""Bytes of the logits (trained tokens x vocabulary) that are held at once. More are computed in chunks, and once more
in the backward pass: this bounds the memory, and costs about a tenth of the time."""


class CausalLM:
    """A Hugging Face causal language model behind packed forward passes.

    The module is always in eval mode: with dropout, the policy that samples and the policy that is trained would be two
    different distributions.
    """

    scalar = False
    """Whether the head gives one number per token instead of logits."""
    accepts_images = False
    """Whether sequences may contain images (engine.backends.torch.vision_lm)."""

    def __init__(
        self, module: nn.Module, *, compute_dtype: torch.dtype, master_dtype: torch.dtype | None = None
    ) -> None:
        """`master_dtype` defaults to the dtype of the first parameter. It differs from it in a frozen module that holds
        some of its parameters in a lower precision."""
        self.module = module.eval()
        self.compute_dtype = compute_dtype
        self.decoder: nn.Module = module.base_model  # type: ignore[assignment]
        self.head: nn.Linear = module.get_output_embeddings()  # type: ignore[operator]
        self.device: torch.device = next(module.parameters()).device
        self.dtype: torch.dtype = master_dtype or next(module.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        return self.head.out_features  # not the weight's shape: a sharded weight is empty between its uses

    @property
    def context_length(self) -> int:
        """The longest sequence, in tokens."""
        config = self.decoder.config
        return context_length_in({key: getattr(config, key, None) for key in CONTEXT_KEYS}) or UNKNOWN_CONTEXT

    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a completion: those of generation_config, or else those of config."""
        for config in (getattr(self.module, "generation_config", None), self.module.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
        return ()

    def with_module(
        self, module: nn.Module, *, compute_dtype: torch.dtype, master_dtype: torch.dtype | None = None
    ) -> Self:
        """A model of the same class over another module of the same architecture."""
        return type(self)(module, compute_dtype=compute_dtype, master_dtype=master_dtype)

    def use_attention(self, implementation: str) -> None:
        """Sets the decoder's attention to the implementation that transformers knows under this name."""
        self.module.set_attn_implementation(implementation)  # type: ignore[operator]

    # -- forward passes ---------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[object]:
        """A context that computes in the lower precision where the compute dtype differs from the master dtype."""
        if self.compute_dtype == self.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    @contextmanager
    def cached_casts(self) -> Iterator[None]:
        """A context within which autocast casts each weight once. Autocast forgets its casts at the end of the
        outermost context that turns it on, which would otherwise be one forward pass. The weights must not change
        within it."""
        if self.compute_dtype == self.dtype:
            yield
            return
        # Autocast is off within it: only forward passes turn it on, not losses and backward passes.
        with self.autocast(), torch.autocast(self.device.type, enabled=False):
            yield

    def hidden(self, token_ids_BT: Tensor, positions_BT: Tensor, layout: Layout, images: Images = ()) -> Tensor:
        """Hidden states (B, T, H) after the final norm. `images` are those of the single row. Raises
        UnsupportedFragment for images that the model does not take."""
        if images:
            raise UnsupportedFragment(
                f"{len(images)} images were given, and {type(self.module).__name__} takes text only; leave them out, "
                "or use a vision-language model"
            )
        return self.decoder(
            input_ids=token_ids_BT, position_ids=positions_BT, use_cache=False, layout=layout
        ).last_hidden_state

    def packed_hidden(self, packed: Packed) -> Tensor:
        """Hidden states (T, H) of a packed row."""
        layout = PackedLayout(packed.groups, device=self.device)
        token_ids_1T, positions_1T = packed.token_ids_T.unsqueeze(0), packed.positions_T.unsqueeze(0)
        return self.hidden(token_ids_1T, positions_1T, layout, packed.images)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) of hidden states (…, H), in float32 at least."""
        return at_least_float32(self._head_logits(hidden))

    def _head_logits(self, hidden: Tensor) -> Tensor:
        """Logits in the head's dtype, or in float32 at least where the architecture caps them."""
        logits = self.head(hidden)
        cap = getattr(self.module.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(at_least_float32(logits) / cap) * cap

    def logprobs(self, packed: Packed, *, temperature: float = 1.0) -> Tensor:
        """Log-probability of each trained token (N,), in nats. Differentiable when gradients are on."""
        with self.autocast():
            hidden_TH = self.packed_hidden(packed)
            hidden_NH = hidden_TH.index_select(0, packed.source_N)
            return self._token_logprobs(hidden_NH, packed.target_N, temperature)

    def logprobs_and_entropy(self, packed: Packed, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of each trained token, and entropy of the distribution that it was drawn from: (N,) each, in
        nats."""
        with self.autocast():
            hidden_TH = self.packed_hidden(packed)
            hidden_NH = hidden_TH.index_select(0, packed.source_N)
            both_N2 = self._token_logprobs_and_entropy(hidden_NH, packed.target_N, temperature)
            return both_N2[:, 0], both_N2[:, 1]

    def values(self, packed: Packed) -> Tensor:
        """Raises BadSpec: only a model with a scalar head has values (engine.backends.torch.scalar_lm)."""
        raise BadSpec(
            f"{type(self.module).__name__} has a language head, and no scalar one; spawn it with "
            "builder.into_scoring_model()"
        )

    def _token_logprobs(self, hidden_NH: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        """(N,): the logprob of each token."""

        def logprobs(hidden_CH: Tensor, target_C: Tensor) -> Tensor:
            return token_logprobs(self._head_logits(hidden_CH), target_C, temperature)

        return self._in_chunks(logprobs, hidden_NH, target_N)

    def _token_logprobs_and_entropy(self, hidden_NH: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        """(N, 2): the logprob of each token, and the entropy of its distribution."""

        def both(hidden_CH: Tensor, target_C: Tensor) -> Tensor:
            logits_CV = self._head_logits(hidden_CH)
            return torch.stack(token_logprobs_and_entropy(logits_CV, target_C, temperature), dim=1)

        return self._in_chunks(both, hidden_NH, target_N)

    def _in_chunks(self, function: Callable[[Tensor, Tensor], Tensor], hidden_NH: Tensor, target_N: Tensor) -> Tensor:
        """`function` of all trained tokens. Where their logits would take too much memory, it is called for some tokens
        at a time, and again in the backward pass."""
        size = max(1, CHUNK_BYTES // (self.compute_dtype.itemsize * self.vocab_size))
        if len(target_N) <= size:
            return function(hidden_NH, target_N)
        chunks = zip(hidden_NH.split(size), target_N.split(size), strict=True)
        return torch.cat([checkpoint(function, hidden, target, use_reentrant=False) for hidden, target in chunks])

    # -- weights ----------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers, sorted by name. Storage that several names share comes once."""
        seen: set[int] = set()
        for name, tensor in sorted(self.module.state_dict(keep_vars=True).items()):
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def weights_nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(tensor.nbytes for _, tensor in self.named_weights())

    def exported_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same weights under the names that `save_pretrained` gives them: a head that is tied to the embedding has
        the embedding's name."""
        # If head and embedding are one tensor, save_pretrained leaves out the head's names.
        left_out: set[str] = set()
        if self.head.weight is self._embedding():
            for name, module in self.module.named_modules():
                if module is self.head:
                    left_out.add(f"{name}.weight")
        seen: set[int] = set()
        for name, tensor in sorted(self.module.state_dict(keep_vars=True).items()):
            if tensor.data_ptr() in seen or name in left_out:
                continue
            seen.add(tensor.data_ptr())
            yield name, tensor

    def _embedding(self) -> Tensor:
        return self.module.get_input_embeddings().weight  # type: ignore[operator]


def master_dtype_of(compute_dtype: torch.dtype) -> torch.dtype:
    """The precision of the master weights of a model that computes in `compute_dtype`."""
    return torch.float64 if compute_dtype == torch.float64 else torch.float32


def frozen_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the module with every parameter in `dtype` and without gradients. Parameters that have this dtype
    already, and weights in 4 bits, are shared, not copied. Buffers keep their dtype, because rotary frequencies in
    bfloat16 would give tokens far into a sequence wrong positions."""
    # `deepcopy` takes an object whose id is in its memo from there, and copies all others.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            memo[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        else:
            memo[id(parameter)] = parameter
    return copy.deepcopy(module, memo)
