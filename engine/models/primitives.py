"""The `train_*` calls of hand-written algorithms. Each adds its samples to the tape at once, and may be awaited.

They add to the gradient of the next `optim_step` only. The loss is normalised over the whole tape, independent of the
order of the calls and of the micro-batches:

- losses per token: mean over all trained tokens of all calls
- GSPO, one ratio per sequence: mean over sequences
- DPO and ranking: mean over pairs
- `train_tangents`: plain sum, because the tangents define the gradient completely

Numbers per token are given for the trained tokens (weight > 0), in the order of `logprobs_per_token`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.errors import BadSpec, SampleTooLong, UnsupportedFragment
from engine.losses.spec import parse_loss
from engine.models.images import check_images_accepted
from engine.models.samples import as_token_ids
from engine.models.scores import last_token_sequence
from engine.models.tape import Enqueued, Loss, Tape, per_token, spread_sum
from engine.protocol import TokenSequence
from engine.specs.adapters import parse_trainable
from engine.text.rendering import Renderer
from engine.text.threads import StringThread, TokenizedThread

Thread = StringThread | TokenizedThread
Numbers = Sequence[float]


class Primitives:
    """Adds the `train_*` calls to training models (engine.models.training_model)."""

    name: str
    max_batch_size: int
    renderer: Renderer

    @property
    def tape(self) -> Tape:
        raise NotImplementedError

    @property
    def trainable(self) -> dict[str, Any]:
        raise NotImplementedError

    # -- policies ----------------------------------------------------------------------------------------------

    def train_language_modelling(self, thread: Thread) -> Enqueued:
        """Cross-entropy: -log p of the thread's trained tokens, as a mean over tokens."""
        return self._add({"kind": "cross_entropy"}, self._sequence(thread))

    def train_ppo(
        self, tokenized: TokenizedThread, logprobs: Numbers, advantages: Numbers | float, clip_range: float
    ) -> Enqueued:
        """PPO's clipped policy gradient (arXiv:1707.06347), as a mean over tokens. `logprobs` are the old policy's."""
        return self._policy_gradient("grpo", tokenized, logprobs, None, advantages, clip_range, clip_range, 0.0)

    def train_grpo(
        self,
        tokenized: TokenizedThread,
        logprobs: Numbers,
        ref_logprobs: Numbers,
        advantages: Numbers | float,
        clip_range: float,
        kl_beta: float,
    ) -> Enqueued:
        """PPO's policy gradient with a KL term to the reference (k3, arXiv:2402.03300), as a mean over tokens."""
        return self._policy_gradient(
            "grpo", tokenized, logprobs, ref_logprobs, advantages, clip_range, clip_range, kl_beta
        )

    def train_gspo(
        self,
        tokenized: TokenizedThread,
        logprobs: Numbers,
        ref_logprobs: Numbers,
        advantages: Numbers | float,
        left_clip: float,
        right_clip: float,
        kl_beta: float,
    ) -> Enqueued:
        """GSPO (arXiv:2507.18071): one ratio per sequence, clipped to [1 - left_clip, 1 + right_clip], as a mean over
        sequences, with the KL term of `train_grpo`.

        `advantages` is one number, a list of one number, or a list with one number per trained token."""
        # numpy and torch scalars have ndim 0 and no length.
        is_scalar = isinstance(advantages, int | float) or getattr(advantages, "ndim", None) == 0
        if not is_scalar and len(advantages) == 1:  # type: ignore[arg-type]
            advantages = float(advantages[0])  # type: ignore[index]
        return self._policy_gradient(
            "gspo", tokenized, logprobs, ref_logprobs, advantages, left_clip, right_clip, kl_beta
        )

    def train_dpo(
        self,
        preferred: Thread,
        dispreferred: Thread,
        ref_logprobs_pos: float | Numbers,
        ref_logprobs_neg: float | Numbers,
        beta: float,
    ) -> Enqueued:
        """DPO (arXiv:2305.18290): -log sigmoid(beta ((L+ - L-) - (Lref+ - Lref-))) of a pair, as a mean over pairs.

        L is the summed logprob of a thread's trained tokens. The reference's logprobs are sums, as `logprobs` returns
        them, or lists per token."""
        # A batch has numbers per token, so a sum is split over the tokens of its sequence.
        pair = self._sequence(preferred), self._sequence(dispreferred)
        reference_logprobs = _reference(ref_logprobs_pos, pair[0]), _reference(ref_logprobs_neg, pair[1])
        return self._add_pair({"kind": "dpo", "beta": float(beta)}, pair, reference_logprobs=reference_logprobs)

    def train_tangents(
        self, inp_tokens: Numbers, image_patches: Any, tangents: Numbers, tgt_tokens: Numbers
    ) -> Enqueued:
        """Any loss, given by its derivative: `tangents[i]` is d(loss)/d(log p of tgt_tokens[i]).

        It is the derivative itself, not its negative: `optim_step` descends the loss. The calls add up, so divide the
        tangents by the number of items that the loss is a mean over. The loss that `optim_step` reports is the sum of
        tangent x logprob, which has no meaning.

        `inp_tokens` and `tgt_tokens` are a serialized thread without its last and without its first token. Tokens with
        tangent 0 have no effect. `image_patches` is the second result of the same `serialize_thread` call: None, or a
        tuple of engine.models.images.PlacedImage. Raises UnsupportedFragment for images if the model accepts only text.
        """
        # Check the arguments.
        images = tuple(image_patches or ())
        if images and self.renderer.tokenizer.images is None:
            raise UnsupportedFragment(
                f"{len(images)} image patches were given, and {self.name!r} takes text only; give None, or train a "
                "vision-language model"
            )
        inputs, targets = [int(token) for token in inp_tokens], [int(token) for token in tgt_tokens]
        if not targets or inputs[1:] != targets[:-1] or len(inputs) != len(targets):
            raise BadSpec(
                f"{len(inputs)} input and {len(targets)} target tokens; expected one sequence without its last and "
                "without its first token: tokens[:-1] and tokens[1:] of serialize_tokenized_thread"
            )

        # The tokens with a tangent are the trained ones. A sample without any is not an error: it trains its last token
        # with tangent 0.
        numbers = per_token("tangents", tangents, len(targets))
        # The first value belongs to the first input token, which nothing predicts and which has no tangent.
        loss_mask = np.array([False, *(number != 0 for number in numbers)])
        if not loss_mask.any():
            loss_mask[-1] = True
        trained_tangents = np.array(numbers)[loss_mask[1:]].tolist()
        token_ids = as_token_ids([inputs[0], *targets], "a sample")
        sequence = TokenSequence(token_ids, loss_mask, images=images)
        return self._add({"kind": "tangents"}, sequence, tangents=trained_tangents)

    # -- scalar models -----------------------------------------------------------------------------------------

    def train_mse(self, thread: Thread, target: float) -> Enqueued:
        """Squared error (score of the last token - target)^2, as a mean over all scored tokens of the tape."""
        return self._add({"kind": "mse"}, self._scored(thread), returns=[float(target)])

    def train_mse_per_token(self, tokenized: TokenizedThread, targets: Numbers | float) -> Enqueued:
        """Squared error (value - target)^2 at the position before each trained token, as a mean over tokens.

        `targets` are in the order of `score`."""
        return self._add({"kind": "mse"}, self._sequence(tokenized), returns=targets)

    def train_trust_region_mse(
        self, tokenized: TokenizedThread, old_values: Numbers, targets: Numbers | float, clip_range: float
    ) -> Enqueued:
        """PPO's clipped value loss, as a mean over tokens.

        Moving a value away from the old one by more than `clip_range` does not reduce the loss."""
        loss: Loss = {"kind": "trust_region_mse", "clip": float(clip_range)}
        return self._add(loss, self._sequence(tokenized), old_values=old_values, returns=targets)

    def train_ranking(self, preferred: Thread, dispreferred: Thread) -> Enqueued:
        """Bradley-Terry loss -log sigmoid(s+ - s-) of the scores at the last tokens, as a mean over pairs."""
        return self._add_pair({"kind": "ranking"}, (self._scored(preferred), self._scored(dispreferred)))

    # -- onto the tape -----------------------------------------------------------------------------------------

    def _policy_gradient(
        self,
        kind: str,
        tokenized: TokenizedThread,
        logprobs: Numbers,
        ref_logprobs: Numbers | None,
        advantages: Numbers | float,
        clip_low: float,
        clip_high: float,
        kl_beta: float,
    ) -> Enqueued:
        loss: Loss = {
            "kind": kind,
            "clip_low": float(clip_low),
            "clip_high": float(clip_high),
            "kl_beta": float(kl_beta),
        }
        columns: dict[str, Numbers | float] = {"old_logprobs": logprobs, "advantages": advantages}
        if ref_logprobs is not None:
            columns["reference_logprobs"] = ref_logprobs
        return self._add(loss, self._sequence(tokenized), **columns)

    def _sequence(self, thread: Thread) -> TokenSequence:
        tokenized = self.renderer.tokenize(thread) if isinstance(thread, StringThread) else thread
        return self.renderer.sequence(tokenized)

    def _scored(self, thread: Thread) -> TokenSequence:
        sequence = self._sequence(thread)
        check_images_accepted(None, [sequence.images], "scored threads")  # no scalar model takes images
        return last_token_sequence(sequence.token_ids.tolist(), end=self.renderer.tokenizer.eos_token_ids[0])

    def _add(self, loss: Loss, sequence: TokenSequence, **columns: Numbers | float) -> Enqueued:
        self._check(loss, sequence)
        return self.tape.add(loss, sequence, **columns)  # type: ignore[arg-type]  # a number stands for every token

    def _add_pair(
        self,
        loss: Loss,
        pair: tuple[TokenSequence, TokenSequence],
        **columns: tuple[Sequence[float], Sequence[float]],
    ) -> Enqueued:
        for sequence in pair:
            self._check(loss, sequence)
        return self.tape.add_pair(loss, pair[0], pair[1], **columns)

    def _check(self, loss: Loss, sequence: TokenSequence) -> None:
        """Raises the errors that the step would raise, so that they come from the call at fault."""
        spec = parse_loss(loss)
        head = parse_trainable(self.trainable).head
        reads_values = spec.reads == "values"
        if reads_values != (head == "scalar"):
            needed = "a scalar head: builder.into_scoring_model()" if reads_values else "a language head"
            raise BadSpec(f"{self.name!r} has a head of kind {head!r}, and the loss {spec.kind!r} needs {needed}")
        if len(sequence.token_ids) > self.max_batch_size:
            raise SampleTooLong(
                f"the sample has {len(sequence.token_ids)} tokens, but {self.name!r} was spawned with "
                f"max_batch_size={self.max_batch_size}; shorten the sample, or spawn with a larger max_batch_size"
            )


def _reference(values: float | Numbers, sequence: TokenSequence) -> list[float]:
    """The reference's logprob of each trained token, from a list or from their sum."""
    trained = sequence.trained
    if isinstance(values, int | float) or getattr(values, "ndim", None) == 0:
        return spread_sum("the sum of the reference's logprobs", float(values), trained)  # type: ignore[arg-type]
    return per_token("reference_logprobs", values, trained)
