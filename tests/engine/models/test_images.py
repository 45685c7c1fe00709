"""Tests of threads with images through model handles: tokens, samples, scores, training, checkpoints and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from engine import workspace as connecting
from engine.errors import BadModelFolder, BadSpec, TextError, ThreadError, TokenizerMissing, UnsupportedFragment
from engine.handles import Model, TrainingModel
from engine.http.client import EngineClient
from engine.local.engine import LocalEngine
from engine.local.queue import GenerationBatcher, PendingGeneration
from engine.models.images import Images, PlacedImage, common_prefix_length, images_to_rows
from engine.models.openai_model import OpenAIModel
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, OnToken, SamplingParams, TokenSequence
from engine.text.fragments import ImageFragment, TextFragment
from engine.text.images import embed_images
from engine.text.rendering import Renderer
from engine.text.threads import StringThread
from engine.text.tokenizers import load_tokenizer
from storage.chain.records import Chain, PolicyRef
from storage.store.tables import commit_table, read_table, table_schema
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, new_policy, request_after, row
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.spawning import Context
from tests.fixtures.vision import BLUE, RED, TOKENS, data_url, plain_inputs, plain_model


def question(url: str, text: str = "what is it?") -> StringThread:
    return StringThread([("user", [TextFragment(text="Look: "), ImageFragment(url=url), TextFragment(text=text)])])


SEEN = question(data_url(RED))
ANSWERED = SEEN.assistant("red")
MESSAGE = {
    "role": "user",
    "content": [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "what is it?"}],
}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}


@pytest.fixture
async def model(ctx: Context, vision_folder: Path) -> TrainingModel:
    return await Model(str(vision_folder)).to_builder(ctx, tokens_to_generate=6).spawn_train("policy")


# -- tokens ------------------------------------------------------------------------------------------------------


async def test_an_image_becomes_its_placeholder_tokens(model: TrainingModel, vision_folder: Path) -> None:
    """The tokens are those of transformers' own processor."""
    tokens, images, weights = await model.serialize_thread(ANSWERED)
    assert tokens == plain_inputs(vision_folder, [MESSAGE, ANSWER], [RED])[0][0].tolist()
    assert images is not None and [image.data for image in images] == [RED]
    token = model.renderer.tokenizer.encode("<image>")[0]
    places = [at for at, one in enumerate(tokens) if one == token]
    assert places == list(range(images[0].start, images[0].start + TOKENS))
    trained = [token for token, weight in zip(tokens, weights, strict=True) if weight > 0]
    assert trained == model.renderer.tokenizer.encode("red<|im_end|>")


async def test_a_file_is_read_when_the_thread_is_rendered(model: TrainingModel, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    by_path = question(str(tmp_path / "red.png")).assistant("red")
    assert await model.serialize_thread(by_path) == await model.serialize_thread(ANSWERED)
    assert embed_images(by_path) == ANSWERED
    drawn = await model.generate_tokens(question(str(tmp_path / "red.png")))
    (tmp_path / "red.png").write_bytes(BLUE)
    _, images, _ = await model.serialize_tokenized_thread(drawn)
    assert images is not None and images[0].data == RED  # what the answer was drawn for
    assert embed_images(ANSWERED) is ANSWERED


async def test_a_vision_model_takes_text_alone(model: TrainingModel) -> None:
    thread = StringThread([("user", "2+3?")])
    assert (await model.serialize_thread(thread.assistant("5")))[1] is None
    assert (await model.generate(thread)).turns[0] == thread.turns[0]
    assert await model.logprobs(thread.assistant("5")) < 0


# -- drawing, scoring, training ------------------------------------------------------------------------------------


async def test_logprobs_are_those_of_transformers(model: TrainingModel, vision_folder: Path) -> None:
    ids, pixels = plain_inputs(vision_folder, [MESSAGE, ANSWER], [RED])
    _, _, weights = await model.serialize_thread(ANSWERED)
    with torch.no_grad():
        logits_TV = plain_model(vision_folder)(input_ids=ids, pixel_values=pixels).logits[0, :-1].log_softmax(-1)
    expected = logits_TV.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1)[torch.tensor(weights[1:]) > 0].sum().item()
    assert await model.logprobs(ANSWERED) == pytest.approx(expected, rel=1e-5)
    assert await model.logprobs(question(data_url(BLUE)).assistant("red")) != pytest.approx(expected, rel=1e-4)


async def test_a_sampled_turn_goes_on_and_keeps_its_image(model: TrainingModel) -> None:
    drawn = await model.generate_tokens(SEEN)
    tokens, images, _ = await model.serialize_tokenized_thread(drawn)
    assert images is not None and len(images) == 1
    after = model.renderer.append(drawn, "user", [ImageFragment(url=data_url(BLUE))])
    more, both, _ = await model.serialize_tokenized_thread(await model.generate_tokens(after))
    assert both is not None and [image.data for image in both] == [RED, BLUE]
    assert more[: len(tokens)] == tokens and both[0] == images[0]
    assert (await model.logprobs_per_token(drawn)) == pytest.approx(drawn.logprobs, rel=1e-4)


async def test_training_on_an_image_makes_its_answer_likelier(model: TrainingModel) -> None:
    other = question(data_url(BLUE)).assistant("blue")
    before = await model.logprobs(ANSWERED) + await model.logprobs(other)
    for _ in range(3):
        model.train_language_modelling(ANSWERED)
        model.train_language_modelling(other)
        model.train_language_modelling(StringThread([("user", "2+3?")]).assistant("5"))
        await model.optim_step(3e-3)
    assert await model.logprobs(ANSWERED) + await model.logprobs(other) > before + 1


async def test_tangents_of_cross_entropy_are_its_step(ctx: Context, model: TrainingModel, vision_folder: Path) -> None:
    tokens, images, weights = await model.serialize_thread(ANSWERED)
    trained = sum(weight > 0 for weight in weights)
    tangents = [-1 / trained if weight > 0 else 0.0 for weight in weights[1:]]
    model.train_tangents(tokens[:-1], images, tangents, tokens[1:])
    await model.optim_step(1e-3)
    other = await Model(str(vision_folder)).to_builder(ctx).spawn_train("other")
    other.train_language_modelling(ANSWERED)
    await other.optim_step(1e-3)
    assert await model.logprobs(ANSWERED) == pytest.approx(await other.logprobs(ANSWERED), rel=1e-5)


async def test_a_grpo_step_over_answers_to_an_image(ctx: Context, model: TrainingModel) -> None:
    drawn = [await model.generate_tokens(SEEN) for _ in range(2)]
    logprobs = [await model.logprobs_per_token(one) for one in drawn]
    before = [await model.logprobs(SEEN.assistant("red"))]
    for one, own, advantage in zip(drawn, logprobs, (1.0, -1.0), strict=True):
        model.train_grpo(one, own, own, advantage, 0.2, 0.01)
    result = await model.optim_step(1e-2)
    assert result["grad_norm"] > 0
    assert [await model.logprobs(SEEN.assistant("red"))] != before
    policy = await model.policy()
    record = Chain.of(ctx.workspace.open_store(), policy).record(1)
    assert record is not None
    rows = read_table(ctx.workspace.open_store(), record.request.batch).to_pylist()
    assert [[image["data"] for image in row["images"]] for row in rows] == [[RED], [RED]]


# -- saved and loaded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [None, {}, {"use_dora": True}], ids=["whole", "lora", "dora"])
async def test_a_saved_model_is_whole(
    ctx: Context, vision_folder: Path, tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    builder = Model(str(vision_folder)).to_builder(ctx)
    if adapter is not None:
        builder = builder.with_adapter(rank=4, **adapter)
    model = await builder.spawn_train("policy")
    before = await model.logprobs(ANSWERED)
    for _ in range(2):  # the first moves B alone, the second A too
        model.train_language_modelling(ANSWERED)
        await model.optim_step(1e-2)
    trained = await model.logprobs(ANSWERED)
    assert trained > before
    key = await model.save("mine", inference_only=False)
    again = await Model(key).to_builder(ctx).spawn_inference("again")
    assert await again.logprobs(ANSWERED) == pytest.approx(trained, rel=1e-5)
    connecting.connect.cache_clear()  # and from its checkpoint, in a new engine
    resumed = await builder.spawn_train("policy")
    assert await resumed.logprobs(ANSWERED) == trained


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("https://example.org/cat.png", UnsupportedFragment, "never fetched"),
        ("http://127.0.0.1/cat.png", UnsupportedFragment, "data: URL"),
        ("s3://bucket/cat.png", UnsupportedFragment, "never fetched"),
        ("/no/such/file.png", ThreadError, "cannot be read"),
        ("data:image/png;base64,***", ThreadError, "not valid base64"),
        ("data:image/png;base64,", ThreadError, "no bytes"),
        ("data:image/png,abc", ThreadError, "expected data:image/png;base64"),
    ],
)
async def test_an_image_without_bytes_is_refused(
    model: TrainingModel, url: str, error: type[TextError], message: str
) -> None:
    for call in (model.generate, model.serialize_thread):
        with pytest.raises(error, match=message):
            await call(question(url))
    with pytest.raises(error, match=message):
        embed_images(question(url))


async def test_text_that_spells_an_image_is_refused(model: TrainingModel) -> None:
    for thread in (StringThread([("user", "an <image> here")]), question(data_url(RED), "and an <image>")):
        with pytest.raises(ThreadError, match="take the token out"):
            await model.generate(thread)


async def test_a_text_model_refuses_image_patches(ctx: Context, tiny_folder: Path) -> None:
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
    with pytest.raises(UnsupportedFragment, match="takes text only"):
        model.train_tangents([1, 5, 6], (PlacedImage(1, 1, RED),), [0.0, 0.0, 1.0], [5, 6, 7])
    for call in (model.generate, model.logprobs, model.serialize_thread):
        with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
            await call(SEEN)


async def test_a_vision_model_has_no_score(ctx: Context, vision_folder: Path) -> None:
    model = await Model(str(vision_folder)).to_builder(ctx).into_scoring_model().spawn_train("policy")
    with pytest.raises(BadModelFolder, match="cannot have a scalar head"):
        await model.score_last_token(StringThread([("user", "2+3?")]))
    with pytest.raises(UnsupportedFragment, match="images"):
        model.train_mse(ANSWERED, 1.0)


async def test_an_engine_whose_model_takes_text_refuses_images(ctx: Context, tiny_folder: Path) -> None:
    """Also without a renderer."""
    engine = ctx.workspace.connect()
    policy = await new_policy(engine, tiny_folder)
    images = (PlacedImage(1, 1, RED),)
    with pytest.raises(UnsupportedFragment, match="prompts hold images, and WholeModelSampler takes text only"):
        await engine.generate(GenerateRequest(policy, [[1, 5]], [0], SamplingParams(max_new_tokens=1), images=[images]))
    sequence = TokenSequence([1, 5, 6], [0.0, 0.0, 1.0], images=images)
    for read in (engine.logprobs, engine.values):
        with pytest.raises(UnsupportedFragment, match="sequences hold images, and TorchTrainer takes text only"):
            await read(LogprobsRequest(policy, [sequence]))
    rows = [row([1, 5], [6]) | {"images": images_to_rows(images)}]
    batch = commit_table(
        ctx.workspace.open_store(), "batch", pa.Table.from_pylist(rows, schema=table_schema("batch", ["images"])),
        kind="batch", provenance=PROVENANCE,
    )  # fmt: skip
    with pytest.raises(UnsupportedFragment, match="rows of the batch"):
        await engine.take_gradient_step(request_after(policy, batch))


def test_a_call_with_images_is_drawn_together_with_one_of_text() -> None:
    heard: list[list[Images] | None] = []
    policy = PolicyRef(run="r", stage="s", model="m", step=0, state="0" * 64)
    images = (PlacedImage(1, 1, RED),)
    calls = [
        PendingGeneration(GenerateRequest(policy, [[1, 5]], [0])),
        PendingGeneration(GenerateRequest(policy, [[1, 6], [1, 7]], [1, 2], images=[images, ()])),
    ]
    batcher = GenerationBatcher(max_rows=8)
    for call in calls:
        batcher.add(call)

    def draw(request: GenerateRequest, _on_token: OnToken, _interrupted: object) -> list[Completion]:
        heard.append(request.images)
        return [Completion([prompt[-1]], [0.0], "length") for prompt in request.prompts]

    assert [done.token_ids for done in batcher.complete(calls[0], draw)] == [[5]]
    assert [done.token_ids for done in batcher.complete(calls[1], draw)] == [[6], [7]]
    assert heard == [[(), images, ()]]


async def test_an_endpoint_takes_no_images() -> None:
    with pytest.raises(UnsupportedFragment, match="turn 0 holds an image"):
        await OpenAIModel.of("openai://127.0.0.1:9/v1#m", "judge", SamplingParams()).generate(SEEN)


def test_a_processor_that_cuts_images_into_tiles_is_refused(vision_folder: Path, tmp_path: Path) -> None:
    for file in vision_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "processor_config.json"
    text = path.read_text()
    path.unlink()
    with pytest.raises(TokenizerMissing, match="without preprocessor_config"):
        load_tokenizer(tmp_path)
    path.write_text(text.replace('"do_image_splitting": false', '"do_image_splitting": true'))
    with pytest.raises(TokenizerMissing, match="do_image_splitting"):
        load_tokenizer(tmp_path)
    path.write_text(text.replace('"image_seq_len": 4', '"image_seq_len": 5'))
    with pytest.raises(TokenizerMissing, match="image_seq_len 5"):
        load_tokenizer(tmp_path)


# -- places ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "prefix", "expected"),
    [
        ([[], []], 9, 9),
        ([[(2, RED)], [(2, RED)]], 9, 9),
        ([[(2, RED)], [(2, BLUE)]], 9, 2),
        ([[(2, RED)], []], 9, 2),
        ([[(2, RED), (7, RED)], [(2, RED), (7, BLUE)]], 9, 7),
        ([[(2, RED)], [(2, RED)]], 4, 2),  # an image is shared whole or not at all
        ([[(2, RED), (20, RED)], [(2, RED)]], 9, 9),  # what stands behind the prefix has no part in it
    ],
)
def test_a_prefix_is_shared_with_its_images(
    places: list[list[tuple[int, bytes]]], prefix: int, expected: int
) -> None:
    images = [tuple(PlacedImage(start, 4, data) for start, data in row) for row in places]
    assert common_prefix_length(images, prefix) == expected


# -- over HTTP -----------------------------------------------------------------------------------------------------


async def test_a_server_answers_as_the_engine_in_this_process(tmp_path: Path, vision_folder: Path) -> None:
    local = LocalEngine(f"file://{tmp_path}/store", DETERMINISTIC)
    policy = await new_policy(local, vision_folder)
    renderer = Renderer(load_tokenizer(vision_folder))
    prompt, other = renderer.prompt_sequence(SEEN), renderer.prompt_sequence(StringThread([("user", "2+3?")]))
    request = GenerateRequest(
        policy, [prompt.token_ids.tolist(), other.token_ids.tolist()], [0, 1], SamplingParams(max_new_tokens=4),
        images=[prompt.images, ()],
    )  # fmt: skip
    scored = LogprobsRequest(policy, [renderer.sequence(renderer.tokenize(ANSWERED))])
    with running_server(local) as url:
        client = EngineClient(f"file://{tmp_path}/store", url)
        assert await client.generate(request) == await local.generate(request)
        assert await client.logprobs(scored) == await local.logprobs(scored)
        broken = replace(scored.sequences[0], images=(replace(scored.sequences[0].images[0], data=b"no image"),))
        with pytest.raises(BadSpec, match="cannot be decoded"):
            await client.logprobs(LogprobsRequest(policy, [broken]))
        await client.close()
    await local.close()
