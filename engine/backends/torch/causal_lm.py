"""A decoder with a language head, as the trainer and the sampler see it: packed forwards and logprobs.

Axes: T packed token · N trained token · V vocabulary · C chunk of trained tokens · H hidden
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint

from engine.backends.torch.attention import IMPLEMENTATION, Layout, PackedLayout, register_attention
from engine.backends.torch.packing import Packed
from engine.backends.weight_files.tensor_files import shapes_of, tensor_bytes
from engine.errors import BadModelFolder, BadSpec
from engine.models.folder import check_model_folder, read_folder_config
from engine.models.images import Images
from engine.text.errors import UnsupportedFragment
from engine.text.images import VISION_MODEL_TYPES

CHUNK_ELEMENTS = 1 << 26
"""Logits (trained tokens x vocabulary) held at once; more than twice this are computed in chunks (256 MiB each in
float32) and once more in the backward pass, which costs 13 % on small batches and bounds memory on large ones."""

PROBE_TOLERANCE = 2e-3
"""Mean |difference| of logprobs, nats, that rounding may cause in float32; a wrong mask or scale gives far more."""


_loading = threading.Lock()
"""transformers loads by patching itself and torch for a while; two loads at once leave the patches behind."""


class CausalLM:
    """A Hugging Face causal language model behind packed forwards. Always in eval mode: dropout would make the
    behaviour policy and the trained one two different distributions."""

    scalar = False
    """Whether its head gives one number per token, not logits."""
    accepts_images = False
    """Whether sequences may hold images (engine.backends.torch.vision_lm)."""

    def __init__(
        self, module: nn.Module, *, compute_dtype: torch.dtype, master_dtype: torch.dtype | None = None
    ) -> None:
        """`master_dtype` is that of the first parameter unless a frozen module holds a part of them lower."""
        self.module = module.eval()
        self.compute_dtype = compute_dtype
        self.decoder: nn.Module = module.base_model  # type: ignore[assignment]
        self.head: nn.Linear = module.get_output_embeddings()  # type: ignore[operator]
        self.device: torch.device = next(module.parameters()).device
        self.dtype: torch.dtype = master_dtype or next(module.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        return self.head.out_features  # not the weight's shape: a sharded one is empty between uses

    @property
    def context_length(self) -> int:
        return int(getattr(self.module.config, "max_position_embeddings", 1 << 30))

    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a completion, from generation_config, else config."""
        for config in (getattr(self.module, "generation_config", None), self.module.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
        return ()

    def like(self, module: nn.Module, *, compute_dtype: torch.dtype, master_dtype: torch.dtype | None = None) -> Self:
        """A model of the same kind over another module of the same architecture."""
        return type(self)(module, compute_dtype=compute_dtype, master_dtype=master_dtype)

    def use_attention(self, implementation: str) -> None:
        """Of the decoder, by the name that transformers knows it under."""
        self.module.set_attn_implementation(implementation)  # type: ignore[operator]

    def autocast(self) -> AbstractContextManager[object]:
        """Lower-precision compute over master weights, where the two dtypes differ."""
        if self.compute_dtype == self.dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def hidden(self, token_ids: Tensor, positions: Tensor, layout: Layout, images: Images = ()) -> Tensor:
        """(B, T) twice -> (B, T, H), final norm included. `images` are those of the one row. Raises UnsupportedFragment
        for images that the model does not take."""
        if images:
            raise UnsupportedFragment(
                f"{len(images)} images were given, and {type(self.module).__name__} takes text only; leave them out, "
                "or take a vision-language model"
            )
        return self.decoder(
            input_ids=token_ids, position_ids=positions, use_cache=False, layout=layout
        ).last_hidden_state

    def packed_hidden(self, packed: Packed) -> Tensor:
        """(T, H) of a packed row."""
        layout = PackedLayout(packed.fans, device=self.device)
        ids, positions = packed.token_ids_T.unsqueeze(0), packed.positions_T.unsqueeze(0)
        return self.hidden(ids, positions, layout, packed.images)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, H) -> (…, V) in float32 at least."""
        logits = at_least_float32(self.head(hidden))
        cap = getattr(self.module.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def logprobs(self, packed: Packed, *, temperature: float = 1.0) -> Tensor:
        """log p of each trained token, nats, (N,). Differentiable when gradients are on."""
        with self.autocast():
            hidden_TH = self.packed_hidden(packed)
            hidden_NH = hidden_TH.index_select(0, packed.source_N)
            return self._token_logprobs(hidden_NH, packed.target_N, temperature)

    def logprobs_and_entropy(self, packed: Packed, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The same, and the entropy of the distribution that each trained token was drawn from, nats: both (N,)."""
        with self.autocast():
            hidden_TH = self.packed_hidden(packed)
            hidden_NH = hidden_TH.index_select(0, packed.source_N)
            both_N2 = self._in_chunks(partial(self._logprob_and_entropy, temperature), hidden_NH, packed.target_N)
            return both_N2[:, 0], both_N2[:, 1]

    def values(self, packed: Packed) -> Tensor:
        """What a model with a scalar head gives (engine.backends.torch.scalar_lm). This one has none: raises
        BadSpec."""
        raise BadSpec(
            f"{type(self.module).__name__} has a language head, and no scalar one; spawn it with "
            "builder.into_scoring_model()"
        )

    def _token_logprobs(self, hidden_NH: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        return self._in_chunks(partial(self._logprob, temperature), hidden_NH, target_N)

    def _logprob(self, temperature: float, hidden_CH: Tensor, target_C: Tensor) -> Tensor:
        logits_CV = self.logits(hidden_CH) / temperature
        return logits_CV.gather(1, target_C.unsqueeze(1)).squeeze(1) - logits_CV.logsumexp(1)

    def _logprob_and_entropy(self, temperature: float, hidden_CH: Tensor, target_C: Tensor) -> Tensor:
        """(C, 2)."""
        logits_CV = self.logits(hidden_CH) / temperature
        norm_C = logits_CV.logsumexp(1)
        entropy_C = norm_C - ((logits_CV - norm_C.unsqueeze(1)).exp() * logits_CV).sum(1)
        return torch.stack([logits_CV.gather(1, target_C.unsqueeze(1)).squeeze(1) - norm_C, entropy_C], dim=1)

    def _in_chunks(self, chunk: Callable[[Tensor, Tensor], Tensor], hidden_NH: Tensor, target_N: Tensor) -> Tensor:
        """`chunk` of all trained tokens, or of some at a time where their logits would take too much memory."""
        size = max(1, CHUNK_ELEMENTS // self.vocab_size)
        if len(target_N) <= 2 * size:
            return chunk(hidden_NH, target_N)
        parts = [
            checkpoint(chunk, h, t, use_reentrant=False)
            for h, t in zip(hidden_NH.split(size), target_N.split(size), strict=True)
        ]
        return torch.cat(parts)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers, each shared storage once, sorted by name."""
        seen: set[int] = set()
        for name, tensor in sorted(self.module.state_dict(keep_vars=True).items()):
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def exported_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same under the names that `save_pretrained` gives: of a tied head and embedding, the embedding's."""
        tied = {id(self.head.weight)} if self.head.weight is self._embedding() else set()
        seen: set[int] = set()
        heads = {f"{name}.weight" for name, module in self.module.named_modules() if module is self.head}
        for name, tensor in sorted(self.module.state_dict(keep_vars=True).items()):
            if tensor.data_ptr() in seen or (id(tensor) in tied and name in heads):
                continue
            seen.add(tensor.data_ptr())
            yield name, tensor

    def _embedding(self) -> Tensor:
        return self.module.get_input_embeddings().weight  # type: ignore[operator]


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, widened where its dtype is a half one."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def frozen_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with every parameter in `dtype`, without gradients; those that have it already are shared, not copied.
    Buffers keep their dtype: rotary frequencies in bfloat16 would put far positions in the wrong place."""
    copies: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in module.parameters()
    }
    return copy.deepcopy(module, copies)


def load_module(auto: Any, folder: Path, *, dtype: torch.dtype) -> Any:
    """What `auto` (a transformers AutoModelFor…) reads from the folder, on the CPU, with packed attention at hand.

    Raises BadModelFolder on anything that is missing, left over or broken."""
    check_model_folder(folder)
    register_attention()
    try:
        with _loading:
            _check_shapes(auto, folder)
            loaded: tuple[Any, dict[str, Any]] = auto.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
    except BadModelFolder:
        raise
    except Exception as error:  # the boundary to transformers: what it raises on a broken file is of any type
        raise BadModelFolder(f"{folder} does not load as a causal language model: {error}") from error
    module, report = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names and kind != "error_msgs"}
    if wrong:
        raise BadModelFolder(
            f"the weights in {folder} do not fit its config.json: "
            + "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names[:5])}" for kind, names in wrong.items())
            + ". Export the model again with save_pretrained"
        )
    return module


def _check_shapes(auto: Any, folder: Path) -> None:
    """Raises BadModelFolder where a tensor has another shape by config.json than in the files, before memory is taken
    for either. Quantized files hold packed shapes, and names that transformers changes are compared after loading."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        return
    with torch.device("meta"):
        module = auto.from_config(config, attn_implementation="eager", trust_remote_code=False)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    stored: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= shapes_of(path)
    wrong = sorted(name for name in expected.keys() & stored.keys() if expected[name] != stored[name])
    if wrong:
        shown = "; ".join(f"{name} is {expected[name]} by it and {stored[name]} in the files" for name in wrong[:5])
        raise BadModelFolder(
            f"the weights in {folder} do not fit its config.json in {len(wrong)} tensors: {shown}; give the "
            "config.json that they were saved with"
        )


def load_causal_lm(folder: Path, *, dtype: torch.dtype, compute_dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Reads a plain Hugging Face folder and checks that packed forwards mean what the model's own forward means.

    Raises:
        BadModelFolder: no config, pickled weights, missing, unexpected or mis-shaped tensors, or a model whose
            logits the packed path does not reproduce.
    """
    from transformers import AutoModelForCausalLM

    if read_folder_config(folder).get("model_type") in VISION_MODEL_TYPES:
        from engine.backends.torch.vision_lm import load_vision_lm

        return load_vision_lm(folder, dtype=dtype, compute_dtype=compute_dtype, device=device)
    module = load_module(AutoModelForCausalLM, folder, dtype=dtype)
    module.to(device)
    if dtype == torch.float64:
        keep_norms_in_float64(module)
    model = CausalLM(module, compute_dtype=compute_dtype)
    probe_packed_forward(model, folder)
    return model


def keep_norms_in_float64(module: nn.Module) -> None:
    """transformers computes RMSNorm in float32 whatever the weights are; a float64 check would stop at 1e-8."""
    for norm in module.modules():
        if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
            scale: Any = norm.weight
            shape, eps = (scale.shape[0],), float(norm.variance_epsilon)  # type: ignore[arg-type]
            norm.forward = partial(rms_norm, normalized_shape=shape, weight=scale, eps=eps)  # type: ignore[method-assign]


@torch.no_grad()
def probe_packed_forward(model: CausalLM, folder: Path) -> None:
    """Compares one short packed forward with the model's own: an architecture that packs wrongly is refused."""
    from engine.backends.torch.packing import Fan

    length = min(8, model.context_length)
    ids_T = torch.arange(length, device=model.device) * 7 % model.vocab_size
    model.use_attention("eager")
    own = model.module(input_ids=ids_T.unsqueeze(0), use_cache=False).logits[0].float()
    check_own_forward(own, model, folder)
    model.use_attention(IMPLEMENTATION)
    layout = PackedLayout([Fan(0, length)], device=model.device)
    hidden = model.hidden(ids_T.unsqueeze(0), torch.arange(length, device=model.device).unsqueeze(0), layout)
    check_probe(model, hidden, own, f"{folder}: packed attention changes this architecture's logprobs", "an attention")


def check_own_forward(own: Tensor, model: CausalLM, folder: Path) -> None:
    """Raises BadModelFolder where the model's own forward gave NaN, which says nothing about its attention."""
    if own.isnan().any():
        raise BadModelFolder(
            f"{folder}: the model's own forward in {model.compute_dtype} gives NaN; if its weights are finite, they "
            "overflow: set engine.compute_dtype='float32', or give other weights"
        )


def check_probe(model: CausalLM, hidden: Tensor, own: Tensor, what: str, used: str) -> None:
    """Raises BadModelFolder unless the packed forward's `hidden` (1, T, H) mean the logits `own` (T, V) of the model's
    own forward."""
    gap = (model.logits(hidden)[0].log_softmax(-1) - own.log_softmax(-1)).abs().mean().item()
    tolerance = PROBE_TOLERANCE if model.dtype in (torch.float32, torch.float64) else 100 * PROBE_TOLERANCE
    if not gap <= tolerance:
        raise BadModelFolder(
            f"{what} by {gap:.2g} nats (at most {tolerance:g} expected); it uses {used} that is not supported yet"
        )


def digest_weights(model: CausalLM) -> tuple[str, dict[str, str]]:
    """sha256 over names, dtypes, shapes and bytes: (digest of all, digest per tensor)."""
    return digest_tensors(model.named_weights())


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], *, base: str = "") -> tuple[str, dict[str, str]]:
    """The same of any tensors, sorted by name; `base` names weights that these add to."""
    return combine_digests({name: digest_tensor(tensor) for name, tensor in tensors}, base=base)


def digest_tensor(tensor: Tensor) -> str:
    """sha256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def combine_digests(parts: Mapping[str, str], *, base: str = "") -> tuple[str, dict[str, str]]:
    """(digest of all, `parts`) of digests by name, sorted by name."""
    lines = [f"base {base}\n"] if base else []
    whole = hashlib.sha256("".join([*lines, *(f"{name} {digest}\n" for name, digest in parts.items())]).encode())
    return whole.hexdigest(), dict(parts)
