"""The probe of a loaded model: packed sequences, a group with branches and a decoding step must give what the model's
own forward pass gives for each sequence alone.

It finds attention that a layout does not compute, and layers that carry a state from token to token (convolutions,
Mamba, linear attention), which do not see where a packed sequence ends. A state has little effect on the logprobs of
some weights, so the outputs of the layers are compared too, at the tokens after a boundary, where a state from another
sequence changes an output by about its own size.

All weights are as loaded, nothing is drawn at random, and no gradient is computed.

Axes: S sequence · L token of a sequence · T packed token · R compared token · B decoded row · H hidden · V vocabulary
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from engine.backends.torch.attention import IMPLEMENTATION, PrefillLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.decoding.kv_cache import DecodeLayout, PromptKeys
from engine.backends.torch.packing import Packed, PrefixGroup, pack
from engine.backends.torch.updates import is_out_of_memory
from engine.backends.torch.vision_lm import VisionLM
from engine.errors import BadModelFolder, EngineError
from engine.models.folder import UNKNOWN_CONTEXT
from engine.models.images import Images, PlacedImage
from engine.models.samples import Sample

ALONE, BRANCHES = 3, 3
"""Number of sequences in the packed row that stand alone, and of those that share a prompt."""
SEQUENCE_TOKENS = 8
"""Tokens of each sequence, without its image. Half of them are the shared prompt of the branches."""


class _Tolerance(NamedTuple):
    """Limits of what rounding may change. In SmolLM2-135M it changes 6e-6 nats and 2e-6 of an output in float32, and
    0.14 nats and 0.10 in bfloat16. A state from another sequence changes an output by 0.3 to 2.4."""

    nats: float
    """Mean |difference| of the logprobs of one token."""
    output: float
    """|difference| of a layer's output at one token, relative to that output."""


TOLERANCES = {torch.float32: _Tolerance(2e-3, 0.01), torch.float64: _Tolerance(2e-3, 0.01)}
"""By the dtype of the weights. The trainers' weights are float32, except those of ZeRO 1 to 3 in bfloat16."""
LOWER_TOLERANCE = _Tolerance(0.5, 0.25)
"""For weights in a lower precision."""
AMPLIFICATION = 4.0
"""By how much a layer may multiply the rounding errors of the layers before it."""
REMEDY = (
    "Use a model all of whose layers are attention, as Llama or Qwen3: layers that carry a state from token to token "
    "(convolutions, Mamba, linear attention), and other forms of attention, are not supported yet"
)


@torch.no_grad()
def probe_model(model: CausalLM, folder: Path) -> None:
    """Compares the packed forward pass and a decoding step with the model's own forward pass, of text and of images if
    the model takes them. The model has packed attention afterwards.

    Raises BadModelFolder, which names the layer that differs and says by how much."""
    _Probe(model, folder, _text_sequences(model)).run()
    if isinstance(model, VisionLM):
        _Probe(model, folder, _image_sequences(model, folder)).run()


# -- the sequences ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sequences:
    """Sequences of equal length: those that stand alone, then those that share a prompt."""

    token_ids_SL: Tensor
    images_S: tuple[Images, ...]
    prompt_tokens: int
    """Number of tokens that the branches share, which include their image."""


def _text_sequences(model: CausalLM) -> _Sequences:
    # A longer sequence than the window would be refused, although the model may be used with shorter ones.
    window = getattr(model.decoder.config, "sliding_window", None) or SEQUENCE_TOKENS
    length = max(2, min(SEQUENCE_TOKENS, model.context_length, window))
    return _sequences(model, length, length // 2)


def _sequences(model: CausalLM, length: int, prompt_tokens: int) -> _Sequences:
    """Token ids at equal distances in the whole vocabulary, without images. They are different unless the sequences
    have more tokens than the vocabulary."""
    count = (ALONE + BRANCHES) * length
    token_ids_SL = (torch.arange(count, device=model.device) * model.vocab_size // count).view(-1, length)
    token_ids_SL[ALONE:, :prompt_tokens] = token_ids_SL[ALONE, :prompt_tokens].clone()
    return _Sequences(token_ids_SL, ((),) * len(token_ids_SL), prompt_tokens)


def _image_sequences(model: VisionLM, folder: Path) -> _Sequences:
    """Sequences with an image after their first token. Neighbours have different images."""
    count, token = model.image_tokens, int(model.module.config.image_token_id)  # type: ignore[union-attr, arg-type]
    length = count + SEQUENCE_TOKENS
    if length > model.context_length:
        raise BadModelFolder(
            f"{folder}: an image takes {count} tokens, more than the context of {model.context_length} has room for; "
            "use a model with a longer context"
        )
    text = _sequences(model, length, count + SEQUENCE_TOKENS // 2)
    token_ids_SL = torch.where(text.token_ids_SL == token, (token + 1) % model.vocab_size, text.token_ids_SL)
    token_ids_SL[:, 1 : 1 + count] = token
    gradient = Image.linear_gradient("L")
    first, second = _as_png(gradient), _as_png(gradient.transpose(Image.Transpose.ROTATE_90))
    data = [first, second, first] + [second] * BRANCHES
    images_S = tuple((PlacedImage(1, count, encoded),) for encoded in data)
    return _Sequences(token_ids_SL, images_S, text.prompt_tokens)


def _as_png(image: Image.Image) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, format="PNG")
    return encoded.getvalue()


# -- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Check:
    """Tokens of a run that are compared with the same tokens in the model's own forward pass. A wrong layer changes all
    of them. A router that rounding sends to another expert changes few, so the smallest difference counts."""

    where: str
    rows_R: Tensor
    """Rows of the run."""
    own_R: Tensor
    """Rows of the model's own forward pass: s * L + l."""


class _Difference(NamedTuple):
    """The first module whose input is that of the model's own forward pass, and whose output is not."""

    module: str | None
    """None: the input of the first module, which are the embeddings, differs."""
    where: str
    change: float
    """Relative to the output."""


class _Probe:
    """One comparison of a model with itself."""

    def __init__(self, model: CausalLM, folder: Path, sequences: _Sequences) -> None:
        self._model, self._folder, self._sequences = model, folder, sequences
        self._tolerance = TOLERANCES.get(model.dtype, LOWER_TOLERANCE)
        self._length = sequences.token_ids_SL.shape[1]
        self._modules = _ModuleOutputs(model.decoder)

    def run(self) -> None:
        """Raises BadModelFolder."""
        packed, decoding_check = self._packed(), self._decoding_check()
        packed_checks = self._packed_checks(packed.groups)

        # Each sequence alone, by the model's own forward pass.
        self._model.use_attention("eager")
        with self._modules.recorded(self._sequences.token_ids_SL.shape, [*packed_checks, decoding_check]):
            expected = self._own_outputs()
        if expected.isnan().any():
            raise BadModelFolder(
                f"{self._folder}: the model's own forward in {self._model.compute_dtype} gives NaN; if its weights are "
                "finite, they overflow: set engine.compute_dtype='float32', or give other weights"
            )
        # All of them in one packed row, then one decoded token after a part of each that stands alone.
        self._model.use_attention(IMPLEMENTATION)
        prefill = PrefillLayout(packed.groups, device=self._model.device)
        row = torch.Size([1, len(packed.token_ids_T)])
        self._compare(partial(self._prefilled, packed, prefill), row, packed_checks, expected)
        if not self._model.scalar:
            decode = partial(self._decoded, prefill, decoding_check)
            self._compare(decode, torch.Size([ALONE, 1]), [decoding_check], expected)

    def _compare(
        self, run: Callable[[], Tensor], shape: torch.Size, checks: Sequence[_Check], expected: Tensor
    ) -> None:
        """Raises BadModelFolder if the hidden states (T, H) that `run` returns, or the outputs of the modules in it,
        are not those of the model's own forward pass. The modules compute tokens of `shape`."""
        try:
            with self._modules.compared(shape, checks, self._tolerance.output) as differences:
                hidden_TH = run()
        except (EngineError, torch.AcceleratorError):
            raise
        except (TypeError, ValueError, LookupError, AttributeError, StopIteration, RuntimeError) as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            raise BadModelFolder(
                f"{self._folder}: {type(self._model.module).__name__} does not compute packed rows ({error!r}); "
                f"{REMEDY}"
            ) from error
        nats = max(self._gap(check, hidden_TH, expected) for check in checks)
        if differences or not nats <= self._tolerance.nats:
            self._refuse(differences, nats)

    def _refuse(self, differences: Sequence[_Difference], nats: float) -> None:
        output = "score" if self._model.scalar else "logprobs"
        unit = "" if self._model.scalar else " nats"
        by = f"{output} by {nats:.2g}{unit} (rounding: at most {self._tolerance.nats:g})"
        if not differences:
            raise BadModelFolder(
                f"{self._folder}: packing changes no layer's output, but the {by}: the model computes them from its "
                "last layer in a way that is not supported, such as scaled logits (Cohere); use another model"
            )
        module, where, change = differences[0]
        subject, value = f"the layer {module}", "its output"
        if module is None:
            subject, value = "the embeddings of the tokens and images", "the input of the first layer"
        raise BadModelFolder(
            f"{self._folder}: {subject} cannot be packed. For {where}, {value} differs by {change:.0%} from that in "
            f"the model's own forward pass (rounding: at most {self._tolerance.output:.0%}), and the {by}. {REMEDY}"
        )

    def _gap(self, check: _Check, hidden_TH: Tensor, expected: Tensor) -> float:
        """The smallest difference of the checked tokens: of their logprobs (a mean over the vocabulary, in nats), or of
        the scores, relative to those above 1."""
        if not self._model.scalar:
            hidden_RH = hidden_TH[check.rows_R].to(self._model.dtype)  # Mamba's last norm is in float32
            logprobs_RV = self._model.logits(hidden_RH).log_softmax(-1)
            expected_RV = expected.flatten(0, 1)[check.own_R].log_softmax(-1)
            return (logprobs_RV - expected_RV).abs().mean(-1).min().item()
        # The model's own forward pass gives scores of last tokens only.
        is_last_R = check.own_R % self._length == self._length - 1
        if not is_last_R.all():
            return 0.0
        expected_R = expected[check.own_R // self._length, 0]
        scores_R = self._model.head(hidden_TH[check.rows_R]).float()[:, 0]
        return ((scores_R - expected_R).abs() / expected_R.abs().clamp_min(1.0)).min().item()

    # -- the runs -----------------------------------------------------------------------------------------------

    def _own_outputs(self) -> Tensor:
        """Logits (S, L, V) of the model's own forward pass. Of a scalar model the score of each sequence (S, 1)."""
        module: Any = self._model.module
        inputs: dict[str, Any] = {"input_ids": self._sequences.token_ids_SL, "use_cache": False}
        if isinstance(self._model, VisionLM) and self._sequences.images_S[0]:
            pixels = [self._model.pixels(images[0].data) for images in self._sequences.images_S]
            inputs["pixel_values"] = torch.stack(pixels).unsqueeze(1).to(self._model.device)
        if not self._model.scalar:
            return module(**inputs).logits.float()
        # With a padding token that no sequence has, the score is that of the last token.
        pad, module.config.pad_token_id = module.config.pad_token_id, -1
        try:
            return module(**inputs).logits.float()
        finally:
            module.config.pad_token_id = pad

    def _packed(self) -> Packed:
        """The sequences in one row, and after them a token at the end of the context: rotary embeddings whose factors
        depend on the longest position would change those of the sequences."""
        sequences, length, prompt = self._sequences, self._length, self._sequences.prompt_tokens
        samples: list[Sample] = []
        for index, token_ids_L in enumerate(sequences.token_ids_SL.cpu().numpy().astype(np.int32)):
            group = "" if index < ALONE else "branches"
            loss_mask = np.arange(length) >= prompt
            samples.append(Sample(token_ids_L, loss_mask, group=group, images=sequences.images_S[index]))
        packed = pack(samples, device=self._model.device)
        if not length < self._model.context_length < UNKNOWN_CONTEXT:
            return packed
        end = PrefixGroup(len(packed.token_ids_T), 1)
        position_1 = packed.positions_T.new_tensor([self._model.context_length - 1])
        return replace(
            packed,
            token_ids_T=torch.cat([packed.token_ids_T, packed.token_ids_T[:1]]),
            positions_T=torch.cat([packed.positions_T, position_1]),
            groups=(*packed.groups, end),
        )

    def _packed_checks(self, groups: Sequence[PrefixGroup]) -> list[_Check]:
        """What is compared in the packed row."""
        length, prompt = self._length, self._sequences.prompt_tokens
        alone = [(groups[index].start, index * length) for index in range(ALONE)]
        shared = (groups[ALONE].start, ALONE * length)
        branches: list[tuple[int, int]] = []
        for index, (start, _) in enumerate(groups[ALONE].branches, start=ALONE):
            branches.append((start, index * length + prompt))

        def check(where: str, pairs: Sequence[tuple[int, int]], offset: int = 0) -> _Check:
            """`pairs`: (row of the run, row of the own forward pass), to which `offset` is added."""
            rows_R, own_R = (torch.tensor(pairs, device=self._model.device) + offset).unbind(1)
            return _Check(where, rows_R, own_R)

        checks = [
            check("a sequence that is packed after another", [*alone[1:], shared]),
            check("packed sequences", alone, length - 1),
            check("a branch that is packed after another branch", branches[1:]),
            check("branches that share a prompt", branches, length - prompt - 1),
        ]
        if self._sequences.images_S[0]:
            checks.insert(0, check("the images of packed sequences", [*alone, shared], 1))
        return checks

    def _prefilled(self, packed: Packed, prefill: PrefillLayout) -> Tensor:
        tokens_1T, positions_1T = packed.token_ids_T.unsqueeze(0), packed.positions_T.unsqueeze(0)
        return self._model.hidden(tokens_1T, positions_1T, prefill, packed.images)[0]

    def _decoding_check(self) -> _Check:
        """The last token of each sequence that stands alone, but the token before it of the second one, so that the
        decoded rows have different lengths."""
        rows_R = torch.arange(ALONE, device=self._model.device)
        own_R = (rows_R + 1) * self._length - 1
        own_R[1] -= 1
        return _Check("a token that is decoded after a computed prompt", rows_R, own_R)

    def _decoded(self, prefill: PrefillLayout, check: _Check) -> Tensor:
        """Hidden states (B, H) of the tokens that are checked. Their prompts are the tokens before them."""
        layout = DecodeLayout(rows=ALONE, capacity=self._length, device=self._model.device)
        for index, own in enumerate(check.own_R.tolist()):
            start = index * self._length
            layout.enter(PromptKeys.of(prefill, start, own - start), shared=False)
        tokens_B = self._sequences.token_ids_SL.flatten()[check.own_R]
        positions_B = layout.advance()
        return self._model.hidden(tokens_B.unsqueeze(1), positions_B.unsqueeze(1), layout)[:, 0]


class _ModuleOutputs:
    """Inputs and outputs of a decoder's modules in the model's own forward pass, for comparison. Modules of torch are
    left out: most compute each token alone, and the others are parts of a layer that is compared."""

    def __init__(self, decoder: nn.Module) -> None:
        self._modules: list[tuple[str, nn.Module]] = []
        for name, module in decoder.named_modules():
            if name and not type(module).__module__.startswith("torch."):
                self._modules.append((name, module))
        self._own: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        """The compared rows of the inputs and outputs of each call, in the order of `_own_rows`."""
        self._own_rows = torch.empty(0, dtype=torch.long)
        """Sorted rows of the model's own forward pass that the checks compare. Those of an image, which may take
        hundreds of tokens in every layer, are few."""

    @contextmanager
    def recorded(self, shape: torch.Size, checks: Sequence[_Check]) -> Iterator[None]:
        """Keeps the rows that the checks compare, of the inputs and outputs of the calls within this context, which
        compute tokens of `shape`."""
        self._own_rows = torch.cat([check.own_R for check in checks]).unique()

        def keep(call: tuple[str, int], _: str, inputs_TH: Tensor, outputs_TH: Tensor) -> None:
            self._own[call] = (inputs_TH[self._own_rows], outputs_TH[self._own_rows])

        with self._hooked(shape, keep):
            yield

    @contextmanager
    def compared(self, shape: torch.Size, checks: Sequence[_Check], tolerance: float) -> Iterator[list[_Difference]]:
        """Yields a list that gets the modules whose outputs differ, in the order of their calls."""
        differences: list[_Difference] = []
        is_first = True

        def compare(call: tuple[str, int], module: str, inputs_TH: Tensor, outputs_TH: Tensor) -> None:
            nonlocal is_first
            if differences or call not in self._own:
                return
            own_inputs, own_outputs = self._own[call]
            for check in checks:
                places_R = torch.searchsorted(self._own_rows, check.own_R.contiguous())
                before = _change(inputs_TH[check.rows_R], own_inputs[places_R])
                after = _change(outputs_TH[check.rows_R], own_outputs[places_R])
                if is_first and not before <= tolerance:
                    differences.append(_Difference(None, check.where, before))
                elif not after <= tolerance and before <= after / AMPLIFICATION:
                    differences.append(_Difference(module, check.where, after))
                if differences:
                    return
            is_first = False

        with self._hooked(shape, compare):
            yield differences

    @contextmanager
    def _hooked(
        self, shape: torch.Size, on_call: Callable[[tuple[str, int], str, Tensor, Tensor], None]
    ) -> Iterator[None]:
        """Calls `on_call` with (name of a module and number of its call, its type, inputs (T, …), outputs (T, …))."""
        calls: Counter[str] = Counter()

        def hook(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] += 1
            inputs = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            outputs = output[0] if isinstance(output, tuple) else output
            if _has_tokens(inputs, shape) and _has_tokens(outputs, shape):
                on_call((name, calls[name]), type(module).__name__, inputs.flatten(0, 1), outputs.flatten(0, 1))

        handles = []
        for name, module in self._modules:
            handles.append(module.register_forward_hook(partial(hook, name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _has_tokens(value: Any, shape: torch.Size) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2 and value.shape[:2] == shape


def _change(run_R: Tensor, own_R: Tensor) -> float:
    """The smallest relative difference of the compared tokens. Differences of zero vectors count as they are."""
    run_RH, own_RH = run_R.flatten(1).float(), own_R.flatten(1).float()
    norm_R = own_RH.norm(dim=1)
    return ((run_RH - own_RH).norm(dim=1) / torch.where(norm_R > 0, norm_R, 1.0)).min().item()
