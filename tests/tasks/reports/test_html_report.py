"""Tests of the HTML report: it is complete, escapes the model's text, is deterministic, and leaves out what a run does
not have."""

import math
import re
from html.parser import HTMLParser
from itertools import chain
from xml.etree import ElementTree

import pytest

from tasks.reports.html_report import TEXT_SHOWN, ReportData, render_report
from tasks.reports.metrics import ACTIVITIES, SampleRollout, StepMetrics, summarise_evaluation

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "div"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def captions(self) -> list[str | None]:
        return [attributes.get("aria-label") for tag, attributes in self.tags if tag == "svg"]


def rl_step(step: int, **changes: object) -> StepMetrics:
    values: dict[str, object] = dict(
        step=step, total_steps=3, reward_mean=0.2 * step, reward_std=0.1, kl_mean=0.01, loss=-0.1, grad_norm=1.0,
        learning_rate=1e-5, completion_tokens=100, completion_length_mean=25.0, prompts=2, completions=4, masked=0,
        entropy=1.0, logprob_gap=0.001, tokens_per_second=50.0, seconds=dict.fromkeys(ACTIVITIES, 1.0),
    )  # fmt: skip
    return StepMetrics.model_validate(values | changes)


def sft_step(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=2.0, grad_norm=1.0, learning_rate=1e-5, seconds={"train": 1.0})


def report(**changes: object) -> ReportData:
    values: dict[str, object] = dict(
        title="GRPO on sums",
        run="grpo-1",
        steps=tuple(rl_step(step) for step in range(3)),
        before=(summarise_evaluation("held-out", [0.0, 0.0, 1.0, None]),),
        after=(summarise_evaluation("held-out", [1.0, 1.0, 1.0, 1.0]),),
        samples_before=(SampleRollout(prompt="1+1?", completion="three", reward=0.0, reference="2"),),
        samples_after=(SampleRollout(prompt="1+1?", completion="two", reward=1.0, reference="2"),),
        facts={"code version": "abc", "config": {"loss": {"clip_low": 0.2}, "stop": ["a"]}},
    )
    return ReportData.model_validate(values | changes)


@pytest.fixture(scope="module")
def full_report() -> str:
    """The page of `report()`, drawn once: its ten charts take most of a second."""
    return render_report(report())


def test_a_full_report_shows_every_part(full_report: str) -> None:
    page = Page(full_report)
    assert page.captions() == [
        "Held-out means with 95 % intervals", "Reward by step", "KL to the reference by step",
        "Completion length by step", "Loss by step", "Gradient norm by step", "Learning rate by step",
        "Entropy by step", "Gap between sampler and trainer by step", "Seconds per step by activity",
    ]  # fmt: skip
    for text in ("GRPO on sums", "grpo-1", "expected: 2", "three", "reward 1", "loss.clip_low", '["a"]', *ACTIVITIES):
        assert text in page.text


def test_the_change_is_paired_over_prompts_graded_in_both() -> None:
    # (0,1) (0,1) (1,1): differences 1, 1, 0. The ends c of the interval, with a weight for -1 or for 1 more:
    # P(mean < c) = (c + 1)³ / (2 · 2 · 1) = 0.025 for c < 0, and P(mean < c) = c³ = 0.975 for c > 0
    after = (summarise_evaluation("held-out", [1.0, 1.0, 1.0, 0.0]),)
    text = " ".join(Page(render_report(report(after=after))).text.split())
    assert "held-out 0.333 1.000 +0.667 (-0.536 to +0.992) 3 2 / 0 within chance" in text


def test_a_models_words_stay_words() -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'</div></main>&amp;{{ 7*7 }}"
    sample = SampleRollout(prompt=evil, completion=evil, reward=0.0, reference=evil)
    evaluations = (summarise_evaluation(evil, [0.0, 1.0]), summarise_evaluation("$x^{$ & $", [0.5]))
    html = render_report(
        report(title=evil, run=evil, before=evaluations, after=evaluations, samples_before=(sample,),
               samples_after=(sample,), facts={evil: evil, "group " + evil: {evil: evil}})
    )  # fmt: skip
    page = Page(html)
    names = [tag for tag, _ in page.tags]
    assert "script" not in names
    assert "img" not in names
    attributes = chain.from_iterable(attributes for _, attributes in page.tags)
    assert not [name for name in attributes if name.startswith("on")]
    assert page.text.count(evil) >= 9
    assert "default-src 'none'" in html


def test_the_file_needs_nothing_else(full_report: str) -> None:
    for tag, attributes in Page(full_report).tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "url(http" not in full_report
    assert "@import" not in full_report


def test_each_drawing_is_well_formed(full_report: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", full_report, flags=re.DOTALL)
    assert len(drawings) == 10
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_equal_data_gives_equal_bytes(full_report: str) -> None:
    assert render_report(report()) == full_report


def test_sft_leaves_out_what_it_has_not() -> None:
    page = Page(render_report(ReportData(title="SFT", run="sft-1", steps=tuple(sft_step(step) for step in range(3)))))
    assert page.captions() == [
        "Loss by step", "Gradient norm by step", "Learning rate by step", "Seconds per step by activity",
    ]  # fmt: skip
    for word in ("eward", "KL", "ompletion", "Sample", "Before", "Facts"):
        assert word not in page.text


def test_nothing_yet_is_still_a_page() -> None:
    assert "not started" in Page(render_report(ReportData(title="not started", run="r"))).text


def test_a_resumption_is_marked_in_every_curve_and_said(full_report: str) -> None:
    html = render_report(report(steps=(rl_step(0), rl_step(1, resumed=True), rl_step(2))))
    assert "resumed at step 2." in " ".join(Page(html).text.split())
    assert html.count("stroke-dasharray") == full_report.count("stroke-dasharray") + 9


def test_values_that_are_not_finite_are_counted_not_fatal() -> None:
    steps = (rl_step(0, grad_norm=math.inf), rl_step(1, loss=math.nan), rl_step(2, reward_std=None))
    assert "not finite in 1 of 3 steps" in Page(render_report(report(steps=steps))).text


def test_one_step_and_many_steps_are_drawn() -> None:
    for count in (1, 400):
        steps = tuple(rl_step(step) for step in range(count))
        assert len(Page(render_report(report(steps=steps))).captions()) == 10


def test_broken_text_is_shown_and_can_be_written() -> None:
    sample = SampleRollout(prompt="\x00\x1b[31m", completion="\ud83d half" + "a" * TEXT_SHOWN, reward=None)
    html = render_report(report(samples_before=(sample,), samples_after=()))
    assert "\N{REPLACEMENT CHARACTER} half" in html.encode().decode()
    page = Page(html)
    assert "… (6 more characters)" in page.text
    assert "no grade" in page.text
    assert "no sample" in page.text


def test_evaluations_of_different_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="4 prompts before and 1 after"):
        report(after=(summarise_evaluation("held-out", [1.0]),))


def test_an_evaluation_without_a_grade_is_refused() -> None:
    with pytest.raises(ValueError, match="2 prompts and no grade"):
        summarise_evaluation("held-out", [None, None])


def test_every_sample_that_was_asked_for_is_shown() -> None:
    samples = tuple(SampleRollout(prompt=f"prompt {n}.", completion="c", reward=None) for n in range(12))
    page = Page(render_report(report(samples_before=samples, samples_after=samples)))
    assert all(sample.prompt in page.text for sample in samples)


def test_the_report_says_why_updates_were_skipped() -> None:
    reasons = tuple(f"update {number} had a gradient of norm nan" for number in range(1, 13))
    steps = (rl_step(0), rl_step(1, skipped_updates=12, skipped_reasons=reasons))
    text = " ".join(Page(render_report(report(steps=steps))).text.split())
    assert "Updates that were skipped: step 2: update 1 had a gradient of norm nan; step 2: update 2" in text
    assert "update 10 had a gradient of norm nan; and 2 more." in text


def test_who_worked_when_is_drawn_for_a_run_whose_lanes_can_overlap() -> None:
    lanes = {"train": [(0.0, 2.0)], "rollout": [(1.0, 3.0), (4.0, 6.0)], "grade": [(3.0, 4.0)]}
    page = render_report(report(steps=(rl_step(0), rl_step(1, lanes=lanes), rl_step(2, lanes=lanes))))
    assert "Trainer, samplers and graders over time" in Page(page).captions()
    svg = page[page.index('aria-label="Trainer, samplers') :]
    svg = svg[: svg.index("</svg>")]
    # four spans in each of the two steps
    bars = re.findall(r'<g id="PolyCollection_\d+">(.*?)</g>', svg, flags=re.DOTALL)
    assert [bar.count("<path") for bar in bars] == [2, 4, 2]
    assert all(f">{name}<" in svg for name in ("trainer", "samplers", "graders"))


def test_a_run_without_lanes_has_no_such_drawing(full_report: str) -> None:
    assert "over time" not in full_report
