"""The divergences of distillation by hand, on a vocabulary of three tokens, and against the whole vocabulary."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import Tensor

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.trainer import TorchTrainer
from engine.errors import BadSpec
from engine.losses.distillation import BaseDivergenceSpec, ForwardKLSpec, JSDSpec
from engine.losses.inputs import LossInputs, Outputs
from engine.models.samples import Sample
from tests.engine.losses.cases import sample, teacher_top
from tests.engine.torch.gradients import update

F64 = torch.float64
TEACHER, STUDENT = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]


def divergence(spec: BaseDivergenceSpec, teacher: list[float], student: list[float], top: int) -> tuple[float, Tensor]:
    """The loss of one token, and its gradient with respect to the student's logits. The teacher's `top` first tokens
    are told apart."""
    logits_1V = torch.tensor([student], dtype=F64).log().requires_grad_()
    logprobs_1V = logits_1V.log_softmax(1)
    inputs = LossInputs(
        Outputs(logprobs_1V[:, 0], top_NK=logprobs_1V[:, :top]),
        (1,),
        teacher_top_NK=torch.tensor([teacher[:top]], dtype=F64).log(),
    )
    token = spec.compute(inputs)
    (value,) = token.values_N
    value.backward()
    assert token.sums["divergence_sum"].item() * spec.weight == pytest.approx(value.item())
    assert logits_1V.grad is not None
    return value.item(), logits_1V.grad[0]


def test_forward_kl_by_hand() -> None:
    # 0.5 ln 2 + 0.25 ln 1 + 0.25 ln 0.5, and q - p
    value, gradient = divergence(ForwardKLSpec(), TEACHER, STUDENT, 3)
    assert value == pytest.approx(0.25 * log(2), abs=1e-8)
    assert gradient.tolist() == pytest.approx([-0.25, 0.0, 0.25], abs=1e-8)
    # the bucket has 0.5 of the teacher and 0.75 of the student: 0.5 ln 2 + 0.5 ln(2/3); q_j - 0.5 q_j / 0.75 in it
    value, gradient = divergence(ForwardKLSpec(), TEACHER, STUDENT, 1)
    assert value == pytest.approx(0.5 * log(4 / 3), abs=1e-8)
    assert gradient.tolist() == pytest.approx([-0.25, 0.25 - 1 / 6, 0.5 - 1 / 3], abs=1e-8)
    doubled, _ = divergence(ForwardKLSpec(weight=2.0), TEACHER, STUDENT, 1)
    assert doubled == pytest.approx(2 * value)


def test_jsd_by_hand() -> None:
    # m = (0.375, 0.25, 0.375): both KL divergences are 0.5 ln(4/3) + 0.25 ln(2/3)
    value, gradient = divergence(JSDSpec(), TEACHER, STUDENT, 3)
    assert value == pytest.approx(0.04247476, abs=1e-8)
    # q_j (g_j - sum of q g), g = 0.5 ln(q/m) = (-0.20273255, 0, 0.14384104), sum of q g = 0.02123738
    assert gradient.tolist() == pytest.approx([-0.05599248, -0.00530934, 0.06130183], abs=1e-7)
    # beta 0.25: m = (0.3125, 0.25, 0.4375), 0.25 * 0.09509785 + 0.75 * 0.01097980
    value, _ = divergence(JSDSpec(beta=0.25), TEACHER, STUDENT, 3)
    assert value == pytest.approx(0.25 * 0.09509785 + 0.75 * 0.01097980, abs=1e-7)
    # one token and the bucket: p = (0.5, 0.5), q = (0.25, 0.75), m = (0.375, 0.625)
    value, _ = divergence(JSDSpec(), TEACHER, STUDENT, 1)
    of_teacher = 0.5 * log(0.5 / 0.375) + 0.5 * log(0.5 / 0.625)
    of_student = 0.25 * log(0.25 / 0.375) + 0.75 * log(0.75 / 0.625)
    assert value == pytest.approx((of_teacher + of_student) / 2, abs=1e-8)


def test_jsd_tends_to_the_two_kl_divergences() -> None:
    """GKD, section 3: JSD(beta) / beta tends to the forward KL divergence, JSD(beta) / (1 - beta) to the reverse."""
    forward = 0.25 * log(2)
    low, _ = divergence(JSDSpec(beta=1e-5), TEACHER, STUDENT, 3)
    assert low / 1e-5 == pytest.approx(forward, rel=1e-4)
    reverse, _ = divergence(ForwardKLSpec(), STUDENT, TEACHER, 3)
    high, _ = divergence(JSDSpec(beta=1 - 1e-5), TEACHER, STUDENT, 3)
    assert high / 1e-5 == pytest.approx(reverse, rel=1e-4)


@pytest.mark.parametrize("spec", [ForwardKLSpec(), JSDSpec(), JSDSpec(beta=0.9)], ids=str)
def test_equal_distributions_have_no_divergence_and_fewer_tokens_never_more(spec: BaseDivergenceSpec) -> None:
    """Putting tokens into one bucket never increases a divergence (the data processing inequality)."""
    for top in (1, 2, 3):
        value, gradient = divergence(spec, TEACHER, TEACHER, top)
        assert value == pytest.approx(0, abs=1e-12)
        assert gradient.abs().max() < 1e-6
    teacher, student = [0.4, 0.3, 0.2, 0.02, 0.08], [0.1, 0.2, 0.3, 0.35, 0.05]
    values = [divergence(spec, teacher, student, top)[0] for top in (1, 2, 3, 4)]
    assert 0 < values[0] < values[1] < values[2] < values[3]
    # a bucket with one token is that token
    assert divergence(spec, teacher, student, 5)[0] == pytest.approx(values[3])


@pytest.mark.parametrize("spec", [ForwardKLSpec(), JSDSpec(beta=0.3)], ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_the_whole_vocabulary_gives_the_full_divergence_in_float32(spec: BaseDivergenceSpec, sharpness: float) -> None:
    """With K the vocabulary, the bucket is empty up to rounding, which neither the loss nor the gradient shows, also
    where some probabilities are below what float32 can add to 1."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(7, 300, generator=generator) * sharpness
    teacher_NV = (torch.randn(7, 300, generator=generator) * sharpness).log_softmax(1)
    beta = getattr(spec, "beta", 0.0)

    def full(student_NV: Tensor) -> Tensor:
        p_NV = teacher_NV.double()
        if spec.kind == "forward_kl":
            return (p_NV.exp() * (p_NV - student_NV)).sum()
        m_NV = (beta * p_NV.exp() + (1 - beta) * student_NV.exp()).log()
        of_student = (student_NV.exp() * (student_NV - m_NV)).nan_to_num().sum()
        return beta * (p_NV.exp() * (p_NV - m_NV)).nan_to_num().sum() + (1 - beta) * of_student

    exact_NV = logits_NV.double().requires_grad_()
    expected = full(exact_NV.log_softmax(1))
    expected.backward()

    leaf_NV = logits_NV.clone().requires_grad_()
    logprobs_NV = leaf_NV.log_softmax(1)
    inputs = LossInputs(Outputs(logprobs_NV[:, 0], top_NK=logprobs_NV), (7,), teacher_top_NK=teacher_NV)
    loss = spec.compute(inputs).values_N.sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert leaf_NV.grad is not None and exact_NV.grad is not None
    assert (leaf_NV.grad - exact_NV.grad).abs().max() < 1e-4


def test_a_batch_without_the_teacher_s_tokens_is_refused(exact: CausalLM) -> None:
    bare = sample([10, 11], [1.0, 1.0], "a")
    with pytest.raises(BadSpec, match="the teacher's most probable tokens and their logprobs, and the batch has none"):
        update(TorchTrainer(exact), [bare], Objective(ForwardKLSpec()))
    columns = teacher_top(bare)
    wider = {name: [row + row[:1] for row in values] for name, values in columns.items()}
    mixed = [sample([10, 11], [1.0, 1.0], "a", **columns), sample([10, 12], [1.0, 1.0], "b", **wider)]
    with pytest.raises(BadSpec, match=r"teacher_top_ids has \[3, 4\] numbers per trained token"):
        update(TorchTrainer(exact), mixed, Objective(ForwardKLSpec()))


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [([1, 2, 3], [-1.0, -1.0, -1.0]), ([1, 2], [-1.0, -1.0, -1.0]), ([1, 2], None), (None, [-1.0, -1.0]), ([], [])],
    ids=str,
)
def test_a_sample_has_equally_many_of_the_teacher_s_tokens_at_each_place(ids: object, logprobs: object) -> None:
    with pytest.raises(BadSpec, match="for 2 trained tokens; give equally many per token in both"):
        Sample([1, 2, 3], [0.0, 1.0, 1.0], teacher_top_ids=ids, teacher_top_logprobs=logprobs)  # type: ignore[arg-type]
