"""The packed forward pass of a vision-language model computes what transformers computes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model, load_with_head
from engine.backends.torch.packing import pack, shared_prefix
from engine.backends.torch.sampler import TorchSampler
from engine.backends.torch.trainer import TorchTrainer
from engine.errors import BadModelFolder, BadSpec, UnsupportedFragment
from engine.losses.likelihood import CrossEntropySpec
from engine.models.images import PlacedImage
from engine.models.samples import Sample
from engine.protocol import SamplingParams, TokenSequence
from engine.specs.adapters import LoraSpec
from tests.engine.torch.gradients import distance, update
from tests.fixtures.adapters import CE, FAST, LORA, backend
from tests.fixtures.vision import BLUE, RED, TOKENS, plain_inputs, plain_model

CPU = torch.device("cpu")
F32 = {"dtype": torch.float32, "compute_dtype": torch.float32, "device": CPU}
IMAGE = {"type": "image"}


def user_turn(text: str) -> dict[str, object]:
    return {"role": "user", "content": [IMAGE, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def model(vision_folder: Path) -> CausalLM:
    return load_model(vision_folder, **F32)


@pytest.fixture(scope="module")
def trainer(model: CausalLM) -> TorchTrainer:
    return TorchTrainer(model)


def sequence(
    folder: Path, text: str, answer: list[int], image: bytes | None, *, group: str = ""
) -> TokenSequence:
    """One image and some text, then the answer, which is trained."""
    content = user_turn(text) if image is not None else {"role": "user", "content": [{"type": "text", "text": text}]}
    prompt = plain_inputs(folder, [content], [image] if image is not None else [], prompt=True)[0][0].tolist()
    token = plain_model_image_token(folder)
    images = (PlacedImage(prompt.index(token), TOKENS, image),) if image is not None else ()
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return TokenSequence(prompt + answer, weights, group, images)


def plain_model_image_token(folder: Path) -> int:
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<image>"))


def plain_logprobs(module: torch.nn.Module, row: TokenSequence, pixels: torch.Tensor | None) -> torch.Tensor:
    """Logprobs of the trained tokens of one sequence, unpacked, with gradient where gradients are on."""
    ids = torch.tensor([row.token_ids])
    logits_TV = module(input_ids=ids, pixel_values=pixels, use_cache=False).logits[0, :-1].log_softmax(-1)
    logprobs = logits_TV.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1)
    return logprobs[torch.tensor(row.loss_mask[1:]) > 0]


def plain_pixels(folder: Path, image: bytes) -> torch.Tensor:
    return plain_inputs(folder, [user_turn("")], [image])[1]


def rows(folder: Path) -> list[TokenSequence]:
    """Sequences of unequal lengths: two answers about one image, the same question about another image, and a question
    without an image."""
    return [
        sequence(folder, "what?", [80, 81, 82], RED, group="a"),
        sequence(folder, "what?", [90], RED, group="a"),
        sequence(folder, "what?", [80, 81], BLUE, group="b"),
        sequence(folder, "and no image?", [70, 71, 72, 73], None, group="c"),
        sequence(folder, "how?", [60], RED),
    ]


@torch.no_grad()
def test_logprobs_are_those_of_transformers_alone_and_packed(vision_folder: Path, trainer: TorchTrainer) -> None:
    by_row = trainer.logprobs(rows(vision_folder), temperature=1.0, max_tokens=4096)
    module = plain_model(vision_folder)
    for row, logprobs in zip(rows(vision_folder), by_row, strict=True):
        pixels = plain_pixels(vision_folder, row.images[0].data) if row.images else None
        expected = plain_logprobs(module, row, pixels)
        torch.testing.assert_close(torch.tensor(logprobs, dtype=expected.dtype), expected, rtol=1e-5, atol=1e-6)
        alone = trainer.logprobs([row], temperature=1.0, max_tokens=4096)[0]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(alone), rtol=1e-5, atol=1e-6)


def test_another_image_changes_the_logprobs(vision_folder: Path, trainer: TorchTrainer) -> None:
    red, blue = (sequence(vision_folder, "what?", [80, 81], image) for image in (RED, BLUE))
    assert red.token_ids.tolist() == blue.token_ids.tolist()
    of_red, of_blue = trainer.logprobs([red, blue], temperature=1.0, max_tokens=4096)
    assert max(abs(a - b) for a, b in zip(of_red, of_blue, strict=True)) > 1e-4


def test_the_gradient_is_that_of_autograd_through_transformers(vision_folder: Path, trainer: TorchTrainer) -> None:
    samples = [Sample(r.token_ids, r.loss_mask, r.group, images=r.images) for r in rows(vision_folder)]
    _, caught = update(trainer, samples, Objective(CrossEntropySpec()))
    module = plain_model(vision_folder)
    losses = [
        -plain_logprobs(module, row, plain_pixels(vision_folder, row.images[0].data) if row.images else None)
        for row in rows(vision_folder)
    ]
    torch.cat(losses).mean().backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert any("vision_model" in name for name in expected) and any("connector" in name for name in expected)
    assert distance(caught, expected) < 1e-5


@pytest.mark.parametrize("spec", [LORA, LORA.model_copy(update={"use_dora": True})], ids=["lora", "dora"])
def test_an_adapter_adapts_every_part_as_peft_does(vision_folder: Path, tmp_path: Path, spec: LoraSpec) -> None:
    from peft import PeftModel

    adapter = backend().adapter(backend().load_base(vision_folder), spec, init_seed=1)
    sequences = rows(vision_folder)
    samples = [Sample(r.token_ids, r.loss_mask, r.group, images=r.images) for r in sequences]
    for _ in range(2):
        adapter.update(samples, CE, FAST, max_tokens=4096)
    moved = {name for name, matrix in adapter.weights() if "lora_B" in name and matrix.any()}
    for part in ("vision_model", "connector", "text_model"):
        assert any(part in name for name in moved)
    adapter.export(tmp_path / "adapter")
    module = PeftModel.from_pretrained(plain_model(vision_folder), tmp_path / "adapter").eval()
    by_row = adapter.logprobs(sequences, temperature=1.0, max_tokens=4096)
    for row, logprobs in zip(sequences, by_row, strict=True):
        pixels = plain_pixels(vision_folder, row.images[0].data) if row.images else None
        with torch.no_grad():
            expected = plain_logprobs(module, row, pixels)
        torch.testing.assert_close(torch.tensor(logprobs, dtype=expected.dtype), expected, rtol=1e-4, atol=1e-5)


def test_greedy_completions_are_those_of_transformers(vision_folder: Path, model: CausalLM) -> None:
    questions = (("what?", RED), ("what?", BLUE), ("so", None))
    prompts = [sequence(vision_folder, text, [], image) for text, image in questions]
    params = SamplingParams(temperature=0, max_new_tokens=8)
    completions = TorchSampler(model).sample(
        [p.token_ids.tolist() for p in prompts], [0, 1, 2], params, images=[p.images for p in prompts]
    )
    module = plain_model(vision_folder)
    for prompt, completion in zip(prompts, completions, strict=True):
        pixels = {"pixel_values": plain_pixels(vision_folder, prompt.images[0].data)} if prompt.images else {}
        ids = torch.tensor([prompt.token_ids])
        whole = module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, **pixels
        )
        assert completion.token_ids == whole[0, len(prompt.token_ids) :].tolist()
    assert completions[0].token_ids != completions[1].token_ids  # else nothing of the image was read


def test_completions_do_not_depend_on_what_they_were_drawn_with(vision_folder: Path, model: CausalLM) -> None:
    prompts = [sequence(vision_folder, "what?", [], image) for image in (RED, BLUE, RED)]
    sampler, params = TorchSampler(model), SamplingParams(max_new_tokens=6, min_new_tokens=6)
    ids, images = [p.token_ids.tolist() for p in prompts], [p.images for p in prompts]
    together = sampler.sample(ids, [7, 8, 9], params, images=images)
    alone = [sampler.sample([ids[i]], [7 + i], params, images=[images[i]])[0] for i in range(3)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


# -- packing -----------------------------------------------------------------------------------------------------


def test_a_group_shares_its_images_and_no_more(vision_folder: Path) -> None:
    first, second, other, *_ = rows(vision_folder)
    start = first.images[0].start
    assert shared_prefix([first, second]) == len(second.token_ids) - 1
    assert shared_prefix([first, other]) == start  # equal tokens, but another image stands there
    packed = pack([first, second], device=CPU)
    assert [image.start for image in packed.images] == [start]
    apart = pack([first, TokenSequence(other.token_ids, other.loss_mask, "a", other.images)], device=CPU)
    assert [image.data for image in apart.images] == [RED, BLUE]
    token = first.token_ids[start]
    for image in apart.images:
        assert apart.token_ids_T[image.start : image.start + TOKENS].tolist() == [token] * TOKENS


def test_a_drawn_image_token_is_a_token_like_any_other(vision_folder: Path, trainer: TorchTrainer) -> None:
    """A model may sample the id of its placeholder token, where there is no image."""
    token = plain_model_image_token(vision_folder)
    row = sequence(vision_folder, "what?", [80, token, 81], RED)
    (logprobs,) = trainer.logprobs([row], temperature=1.0, max_tokens=4096)
    assert len(logprobs) == 3


# -- refused -----------------------------------------------------------------------------------------------------


def test_a_text_model_refuses_images(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, **F32)
    row = TokenSequence([1, 5, 6, 7], [0.0, 0.0, 0.0, 1.0], images=(PlacedImage(1, 1, RED),))
    with pytest.raises(UnsupportedFragment, match="takes text only"):
        TorchTrainer(model).logprobs([row], temperature=1.0, max_tokens=64)
    with pytest.raises(UnsupportedFragment, match="takes text only"):
        TorchSampler(model).sample([[1, 5, 6]], [0], SamplingParams(max_new_tokens=1), images=[row.images])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (PlacedImage(0, TOKENS, RED), "not the model's image token"),
        (PlacedImage(0, TOKENS + 1, RED), "5 placeholder tokens"),
    ],
)
def test_an_image_in_the_wrong_place_is_refused(
    vision_folder: Path, trainer: TorchTrainer, image: PlacedImage, message: str
) -> None:
    row = sequence(vision_folder, "what?", [80], RED)
    with pytest.raises(BadSpec, match=message):
        trainer.logprobs([TokenSequence(row.token_ids, row.loss_mask, "", (image,))], temperature=1.0, max_tokens=64)


def encoded(width: int, height: int, file_format: str) -> bytes:
    """An encoded black image, which takes a few kB at any size."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, format=file_format)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no image", "cannot be decoded"),
        (RED[: len(RED) // 2], "cannot be decoded"),
        (encoded(8192, 4097, "PNG"), "has 33562624 pixels, and at most 33554432"),
        (encoded(8, 8, "TIFF"), "cannot be decoded"),
    ],
)
def test_bytes_that_are_no_image_are_refused(
    vision_folder: Path, trainer: TorchTrainer, data: bytes, message: str
) -> None:
    row = sequence(vision_folder, "what?", [80], RED)
    broken = PlacedImage(row.images[0].start, TOKENS, data)
    with pytest.raises(BadSpec, match=message):
        trainer.logprobs([TokenSequence(row.token_ids, row.loss_mask, "", (broken,))], temperature=1.0, max_tokens=64)


def test_a_vision_model_has_no_scalar_head(vision_folder: Path) -> None:
    with pytest.raises(BadModelFolder, match="cannot have a scalar head"):
        load_with_head(vision_folder, head="scalar", init_seed=0, **F32)
