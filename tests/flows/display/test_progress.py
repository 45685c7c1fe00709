"""Tests of the terminal output: plain lines where nothing can be redrawn, and a live view where it can."""

import io
import math

from rich.console import Console

from flows.display.terminal import TerminalProgress, format_duration, step_line
from tasks.reports.metrics import StepMetrics


def rl_step(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, total_steps=20, reward_mean=0.25, kl_mean=0.003, loss=-0.0123, grad_norm=1.0, learning_rate=1e-5,
        completion_length_mean=31.6, masked=1, tokens_per_second=1234.4,
        seconds={"rollout": 6.0, "grade": 0.001, "train": 3.0, "storage": 1.0},
    )  # fmt: skip


def sft_step(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=2.5, grad_norm=1.0, learning_rate=1e-5, tokens_per_second=900.0)


def plain() -> tuple[TerminalProgress, io.StringIO]:
    out = io.StringIO()
    return TerminalProgress(Console(file=out, width=60, force_terminal=False)), out


def test_an_rl_step_is_one_line() -> None:
    assert step_line(rl_step(6), total_steps=20, eta_seconds=130.0) == (
        "step 7/20  reward 0.250  loss -0.0123  kl 0.0030  length 32  masked 1  tok/s 1,234  "
        "10.0s (rollout 60%, train 30%, storage 10%)  2m10s left"
    )


def test_an_sft_step_leaves_out_what_it_has_not() -> None:
    assert step_line(sft_step(0)) == "step 1  loss 2.5000  tok/s 900"
    # a step without a loss of the policy; a skipped update has a loss that is not a number
    without_loss = sft_step(0).model_copy(update={"loss": math.nan})
    assert step_line(without_loss) == "step 1  tok/s 900"
    assert step_line(without_loss.model_copy(update={"skipped_updates": 1})) == "step 1  loss nan  skipped 1  tok/s 900"


def test_a_step_on_pairs_says_how_they_stand() -> None:
    step = sft_step(0).model_copy(update={"pair_accuracy": 0.75, "pair_margin": -0.0125})
    assert step_line(step) == "step 1  loss 2.5000  accuracy 0.75  margin -0.013  tok/s 900"


def test_without_a_terminal_each_step_is_one_line_however_narrow() -> None:
    progress, out = plain()
    with progress:
        progress.start(20, 0)
        progress.step(rl_step(0), seconds_left=190.0)
        progress.note("a [bold]note[/bold] of model/[path]")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/20  reward 0.250")
    assert lines[0].endswith("3m10s left")
    assert lines[1] == "a [bold]note[/bold] of model/[path]"
    assert "\x1b" not in out.getvalue()


def test_a_resumed_run_says_where_it_goes_on() -> None:
    progress, out = plain()
    progress.start(20, 12)
    progress.step(rl_step(12).model_copy(update={"resumed": True}), seconds_left=35.0)
    first, second = out.getvalue().splitlines()
    assert first == "resuming after step 12: next is step 13/20"
    assert second.startswith("step 13/20")
    assert second.endswith("35s left  resumed")


def test_a_run_resumed_after_its_last_step_promises_no_further_one() -> None:
    progress, out = plain()
    progress.start(20, 20)
    assert out.getvalue() == "resuming: all 20 steps are committed\n"


def test_on_a_terminal_a_bar_and_a_table_are_redrawn() -> None:
    out = io.StringIO()
    console = Console(file=out, width=110, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    progress = TerminalProgress(console)
    progress.start(20, 0)
    for step in range(12):
        progress.step(rl_step(step), seconds_left=10.0 * (19 - step))
    progress.note("a checkpoint was saved")
    progress.close()
    progress.close()
    text = out.getvalue()
    assert "\x1b[" in text
    last_view = text[text.rindex("reward") :]
    for part in ("12", "0.250", "rollout 60%", "step 12/20", "1m20s left"):
        assert part in last_view
    assert "a checkpoint was saved" in text
    assert "\x1b[?25h" in text  # the cursor is back


def test_an_open_end_has_no_eta_and_an_instance_can_start_again() -> None:
    out = io.StringIO()
    console = Console(file=out, width=110, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    with TerminalProgress(console) as progress:
        progress.start(None)
        progress.step(sft_step(0))
        progress.start(5)
        progress.step(sft_step(0))
    assert "step 1/5" in out.getvalue() and "step 0" not in out.getvalue()
    assert "reward" not in out.getvalue()


def test_a_step_without_a_start_begins_there() -> None:
    progress, out = plain()
    progress.step(rl_step(3))
    assert "step 4/20" in out.getvalue()


def test_durations() -> None:
    seconds = (0, 59.6, 185, 7620, 3 * 86400 + 4 * 3600)
    assert [format_duration(value) for value in seconds] == ["0s", "1m00s", "3m05s", "2h07m", "3d04h"]
