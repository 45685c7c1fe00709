"""A decoder with a language head, as the trainer and the sampler use it: packed forward passes, logits and logprobs.

`engine.backends.torch.loading` reads it from a model folder.

Autograd would keep the logits in float32, and three more tensors of that size in the backward pass. `token_logprobs`
keeps only the logits, in their own dtype, and computes the gradient in blocks of rows that stay in the processor's
cache.

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
from engine.errors import BadSpec, UnsupportedFragment
from engine.models.folder import CONTEXT_KEYS, UNKNOWN_CONTEXT, context_length_in
from engine.models.images import Images

CHUNK_BYTES = 1 << 29
"""Bytes of the logits (trained tokens x vocabulary) that are held at once. More are computed in chunks, and once more
in the backward pass: this bounds the memory, and costs about a tenth of the time."""

BLOCK_ELEMENTS = {"cpu": 1 << 18}
"""Logits of a block by device type: 1 MiB in float32, the size of a core's cache."""
DEFAULT_BLOCK_ELEMENTS = 1 << 26
"""Logits of a block on other devices, where each block costs kernel launches."""


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

    def top_logprobs(self, packed: Packed, count: int) -> Tensor:
        """For each trained token, its log-probability in nats, then those of the `count` most probable tokens, then the
        ids of these: (N, 1 + 2 count)."""
        with self.autocast():
            hidden_TH = self.packed_hidden(packed)
            return self._token_top_logprobs(hidden_TH.index_select(0, packed.source_N), packed.target_N, count)

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

    def _token_top_logprobs(self, hidden_NH: Tensor, target_N: Tensor, count: int) -> Tensor:
        def top(hidden_CH: Tensor, target_C: Tensor) -> Tensor:
            return top_logprobs(self._head_logits(hidden_CH), target_C, count)

        return self._in_chunks(top, hidden_NH, target_N)

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


def frozen_copy(module: nn.Module, dtype: torch.dtype, *, share: bool = True) -> nn.Module:
    """A copy of the module with every parameter in `dtype` and without gradients. Weights in 4 bits are shared, not
    copied, and with `share` also the parameters that have this dtype already. Buffers keep their dtype, because rotary
    frequencies in bfloat16 would give tokens far into a sequence wrong positions."""
    # `deepcopy` takes an object whose id is in its memo from there, and copies all others.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            memo[id(parameter)] = nn.Parameter(parameter.detach().to(dtype, copy=not share), requires_grad=False)
        else:
            memo[id(parameter)] = parameter
    return copy.deepcopy(module, memo)


def token_logprobs(logits_NV: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[target], (N,) in nats, in float32 at least."""
    logprobs_N: Tensor = _TokenLogprobs.apply(logits_NV, target_N, temperature, False)[0]
    return logprobs_N


def token_logprobs_and_entropy(logits_NV: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logprobs of `token_logprobs`, and the entropy of each distribution, both (N,) in nats."""
    logprobs_N, entropy_N = _TokenLogprobs.apply(logits_NV, target_N, temperature, True)
    return logprobs_N, entropy_N


def top_logprobs(logits_NV: Tensor, target_N: Tensor, count: int) -> Tensor:
    """log softmax(logits) of the target, then of the `count` most probable tokens, in nats, then the ids of these:
    (N, 1 + 2 count), in float64, which holds every id. A target that is the most probable token has exactly its
    logprob."""
    x_NV = at_least_float32(logits_NV)
    norm_N1 = x_NV.logsumexp(1, keepdim=True)
    highest_NK, ids_NK = x_NV.topk(count, dim=1)
    chosen_N1 = x_NV.gather(1, target_N.unsqueeze(1))
    return torch.cat([(chosen_N1 - norm_N1).double(), (highest_NK - norm_N1).double(), ids_NK.double()], dim=1)


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, in float32 if its dtype is a 16-bit one."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class _TokenLogprobs(torch.autograd.Function):
    """With x = logits / temperature, z = logsumexp(x), p = exp(x - z) and H = z - Σ p·x, the outputs are x[target] - z
    and H. Their derivatives with respect to x are onehot(target) - p and -p·(x - z + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, target_N: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        norms, logprobs, entropies = [], [], []
        for rows in _blocks(logits_NV):
            x_BV = _scaled(logits_NV[rows], temperature)
            norm_B = x_BV.logsumexp(1)
            norms.append(norm_B)
            logprobs.append(x_BV.gather(1, target_N[rows].unsqueeze(1)).squeeze(1) - norm_B)
            if with_entropy:
                entropies.append(norm_B - ((x_BV - norm_B.unsqueeze(1)).exp() * x_BV).sum(1))
        entropy_N = torch.cat(entropies) if with_entropy else None
        ctx.temperature = temperature
        ctx.save_for_backward(logits_NV, target_N, torch.cat(norms), entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits_NV, target_N, norm_N, entropy_N = ctx.saved_tensors
        logprob_grad_N, entropy_grad_N = gradients
        assert logprob_grad_N is not None
        grad_NV = torch.empty_like(logits_NV)
        for rows in _blocks(logits_NV):
            logp_BV = _scaled(logits_NV[rows], ctx.temperature).sub_(norm_N[rows].unsqueeze(1))
            grad_B1 = logprob_grad_N[rows].unsqueeze(1)
            if entropy_grad_N is None:
                grad_BV = logp_BV.exp_().mul_(-grad_B1)
            else:
                # -p·g for the logprob, and -p·(x - z + H)·h for the entropy.
                factor_BV = (logp_BV + entropy_N[rows].unsqueeze(1)).mul_(entropy_grad_N[rows].unsqueeze(1))
                grad_BV = factor_BV.add_(grad_B1).mul_(logp_BV.exp_()).neg_()
            grad_BV.scatter_add_(1, target_N[rows].unsqueeze(1), grad_B1)
            if ctx.temperature != 1:
                grad_BV.div_(ctx.temperature)
            grad_NV[rows] = grad_BV
        return grad_NV, None, None, None


def _scaled(logits_BV: Tensor, temperature: float) -> Tensor:
    """A copy of the logits in float32 at least, divided by the temperature."""
    wide = torch.promote_types(logits_BV.dtype, torch.float32)
    x_BV = logits_BV.to(wide, copy=True)
    return x_BV if temperature == 1 else x_BV.div_(temperature)


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    """Slices of the rows, each of about as many logits as a block has. One slice at least."""
    count, vocabulary = logits_NV.shape
    rows = max(1, BLOCK_ELEMENTS.get(logits_NV.device.type, DEFAULT_BLOCK_ELEMENTS) // vocabulary)
    for start in range(0, max(1, count), rows):
        yield slice(start, start + rows)
