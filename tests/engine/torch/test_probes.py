"""The probe of a loaded model: layers that packed rows or decoding would compute wrongly are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.deepspeed.backend import DeepSpeedBackend
from engine.backends.torch import probes
from engine.backends.torch.attention import PackedLayout, register_attention
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.decoding.kv_cache import DecodeLayout
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import PrefixGroup
from engine.backends.torch.probes import probe_model
from engine.backends.torch.vision_lm import VisionLM
from engine.errors import BadModelFolder, BadSpec
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from tests.fixtures.architectures import PACKED, SIZES, UNPACKED, UNPACKED_ATTENTION, save_tiny, tiny_module

CPU = torch.device("cpu")
F32: dict[str, Any] = {"dtype": torch.float32, "compute_dtype": torch.float32, "device": CPU}


def deepspeed() -> DeepSpeedBackend:
    return DeepSpeedBackend(
        LocalEngineSpec(trainer=DeepSpeedSpec(ranks=2), device="cpu", compute_dtype="float32", threads=1)
    )


@pytest.mark.parametrize("name", UNPACKED)
def test_a_model_whose_layers_cannot_be_packed_is_refused_with_the_layer(name: str, tmp_path: Path) -> None:
    layer, config = UNPACKED[name]
    folder = save_tiny(name, config, tmp_path / "model")
    refused = rf"the layer {layer} cannot be packed.* differs by \d+% .* logprobs by [\d.e-]+ nats .*Use a model all"
    with pytest.raises(BadModelFolder, match=refused):
        load_model(folder, **F32)
    with pytest.raises(BadModelFolder, match=refused):
        deepspeed().try_load(folder)


@pytest.mark.parametrize("name", PACKED)
def test_a_model_that_packs_right_loads(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, PACKED[name], tmp_path / "model")
    load_model(folder, **F32)
    deepspeed().try_load(folder)


@pytest.mark.parametrize("name", ["Lfm2", "Qwen3Next", "Mamba"])
def test_a_state_shows_in_lower_precision_too(name: str) -> None:
    with pytest.raises(BadModelFolder, match=UNPACKED[name][0]):
        probe_model(in_bfloat16(name, UNPACKED[name][1]), Path("model"))


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "Qwen3Moe", "DeepseekV3"])
def test_rounding_in_lower_precision_is_no_reason_to_refuse(name: str) -> None:
    """A router sends some tokens to other experts there."""
    probe_model(in_bfloat16(name, PACKED[name]), Path("model"))


def in_bfloat16(name: str, config: dict[str, Any]) -> CausalLM:
    register_attention()
    return CausalLM(tiny_module(name, config, dtype=torch.bfloat16), compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["Mamba", "Qwen3Next"])
def test_the_figure_is_the_difference_of_the_logprobs_in_nats(name: str) -> None:
    """It is between the smallest difference at the first tokens of packed sequences, and the largest at any token."""
    module = tiny_module(name, UNPACKED[name][1]).eval()
    register_attention()
    with pytest.raises(BadModelFolder) as refused:
        probe_model(CausalLM(module, compute_dtype=torch.float32), Path("model"))
    figure = float(re.search(r"logprobs by ([\d.e-]+) nats", str(refused.value)).group(1))  # type: ignore[union-attr]
    # The packed sequences of the probe. A layer with a state sees one long sequence.
    ids = (torch.arange(48) * 259 // 48).view(6, 8)[:4]
    with torch.no_grad():
        module.set_attn_implementation("eager")
        alone = module(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        joined = module(input_ids=ids.view(1, -1), use_cache=False).logits.log_softmax(-1).view(4, 8, -1)
    gaps = (joined - alone).abs().mean(-1)[1:]
    assert gaps[:, 0].min() > 0.005
    assert 0.9 * gaps[:, 0].min() <= figure <= 1.1 * gaps.max()


@pytest.mark.parametrize(
    ("name", "feature"), [("Gemma2", "soft-caps its attention scores"), ("GptOss", "has attention sinks")]
)
def test_attention_with_features_that_packing_does_not_have_is_refused(name: str, feature: str, tmp_path: Path) -> None:
    folder = save_tiny(name, UNPACKED_ATTENTION[name], tmp_path / "model")
    with pytest.raises(BadSpec, match=feature):
        load_model(folder, **F32)
    with pytest.raises(BadSpec, match=feature):
        deepspeed().try_load(folder)


def test_outputs_that_are_not_the_heads_are_refused_and_no_layer_is_blamed(tmp_path: Path) -> None:
    """Cohere multiplies its logits by a number."""
    folder = save_tiny("Cohere", SIZES, tmp_path / "model")
    refused = "packing changes no layer's output, but the logprobs by .* such as scaled logits"
    with pytest.raises(BadModelFolder, match=refused):
        load_model(folder, **F32)


# -- one kind of defect each -------------------------------------------------------------------------------------------


def test_decoding_that_forgets_its_prompt_is_refused(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend_to_itself(_: Any, _layer: int, _query: Tensor, _key: Tensor, value: Tensor, _scale: float) -> Tensor:
        return value.transpose(1, 2).repeat_interleave(2, dim=2)

    monkeypatch.setattr(DecodeLayout, "attend", attend_to_itself)
    refused = "layer LlamaAttention cannot be packed. For a token that is decoded after a computed prompt"
    with pytest.raises(BadModelFolder, match=refused):
        load_model(tiny_folder, **F32)


def joined_branches(groups: list[PrefixGroup]) -> list[PrefixGroup]:
    """Each branch attends to the branches before it."""
    joined = []
    for group in groups:
        length = sum(branch for _, branch in group.branches)
        joined.append(PrefixGroup(group.start, group.prefix, ((group.branches[0][0], length),) if length else ()))
    return joined


def joined_sequences(groups: list[PrefixGroup]) -> list[PrefixGroup]:
    """Every sequence attends to those before it."""
    index = next(index for index, group in enumerate(groups) if group.branches)
    branching = groups[index]
    joined = PrefixGroup(0, branching.start + branching.prefix, branching.branches)
    return [joined, *groups[index + 1 :]]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [(joined_branches, "branch that is packed after another"), (joined_sequences, "sequence that is packed after")],
)
def test_attention_to_another_sequence_is_refused(
    wrong: Callable[[list[PrefixGroup]], list[PrefixGroup]],
    where: str,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init = PackedLayout.__init__
    monkeypatch.setattr(PackedLayout, "__init__", lambda self, groups, **kw: init(self, wrong(list(groups)), **kw))
    with pytest.raises(BadModelFolder, match=f"layer LlamaAttention cannot be packed. For a {where}"):
        load_model(tiny_folder, **F32)


def test_scores_of_packed_rows_are_compared(scalar_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(scalar_folder, **F32)
    right = PackedLayout.attend
    monkeypatch.setattr(PackedLayout, "attend", lambda *args: 0.5 * right(*args))
    with pytest.raises(BadModelFolder, match="LlamaAttention cannot be packed.* and the score by"):
        load_model(scalar_folder, **F32)


def test_images_of_another_sequence_are_refused(vision_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = VisionLM._with_features

    def rotated(self: VisionLM, embedded: Tensor, ids: Tensor, images: Any) -> Tensor:
        """Each image gets the next one's bytes."""
        data = [image.data for image in images]
        moved = zip(images, data[1:] + data[:1], strict=True)
        return right(self, embedded, ids, [type(image)(image.start, image.tokens, other) for image, other in moved])

    load_model(vision_folder, **F32)
    monkeypatch.setattr(VisionLM, "_with_features", rotated)
    refused = (
        "the embeddings of the tokens and images cannot be packed. For the images of packed sequences, the input of "
        "the first layer differs"
    )
    with pytest.raises(BadModelFolder, match=refused):
        load_model(vision_folder, **F32)


def test_mismatched_shapes_are_refused_as_a_layer_that_does_not_compute_packed_rows(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedLayout, "attend", lambda *_: torch.ones(2) + torch.ones(3))
    with pytest.raises(BadModelFolder, match=r"does not compute packed rows \(RuntimeError.*size of tensor"):
        load_model(tiny_folder, **F32)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 8 bytes")]
)
def test_missing_memory_is_no_fault_of_the_folder(
    error: RuntimeError, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Tensor:
        raise error

    monkeypatch.setattr(PackedLayout, "attend", fail)
    with pytest.raises(type(error), match="memory"):
        load_model(tiny_folder, **F32)


@pytest.mark.parametrize("tokens", [8, 64])
def test_the_probe_keeps_the_compared_tokens_only(
    tokens: int, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the length 2n of the six sequences is, of which the last three share their first n tokens."""
    kept: list[tuple[int, int]] = []
    recorded = probes._ModuleOutputs.recorded

    @contextmanager
    def spied(self: Any, *args: Any) -> Iterator[None]:
        with recorded(self, *args):
            yield
        kept.extend((len(inputs), len(outputs)) for inputs, outputs in self._own.values())

    monkeypatch.setattr(probes, "SEQUENCE_TOKENS", tokens)
    monkeypatch.setattr(probes._ModuleOutputs, "recorded", spied)
    load_model(tiny_folder, **F32)
    # First tokens 2n, 4n, 6n; last tokens 2n-1, 4n-1, 6n-1; first of branches 9n, 11n; last of branches 8n-1, 10n-1,
    # 12n-1; decoded 2n-1, 4n-2, 6n-1: 12 different rows.
    assert set(kept) == {(12, 12)}


# -- nothing changes ---------------------------------------------------------------------------------------------------


def test_the_probe_leaves_no_trace(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, **F32)
    weights = {name: tensor.clone() for name, tensor in model.named_weights()}
    buffers = {name: tensor.clone() for name, tensor in model.module.named_buffers()}
    generator = torch.get_rng_state()
    probe_model(model, tiny_folder)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.named_weights())
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in model.module.named_buffers())
    assert all(parameter.grad is None for parameter in model.module.parameters())
    assert not any(module._forward_hooks for module in model.module.modules())
