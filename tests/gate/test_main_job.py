"""What the report of the main job says in words that it proved."""

from conformance.subjects import main
from conformance.verdict import Cell, Report


def report(*cells):
    return Report(
        cells=tuple(Cell(subject=s, check=c, verdict=v) for s, c, v in cells), seed=1, contract="1"
    )


def test_the_main_job_says_what_was_compared_with_what():
    text = main.proofs(
        report(
            ("main:moe", "keys.total", "pass"),
            ("main:moe", "job.resume", "pass"),
            ("main:moe", "job.export", "fail"),
            ("main:dense-tied", "keys.total", "pass"),
        )
    )
    assert text.splitlines() == [
        "what the real jobs proved, each in processes of its own",
        "  fixtures/qwen3/moe: 104 tensors, bfloat16, written by transformers 5.24.0",
        "    proved   a job stopped at steps 2 and 4 and resumed each time: every loss, and the "
        "whole state of step-4, bitwise compared with a run that was never stopped",
        "    not proved (fail) the last step as Hugging Face safetensors: keys and shapes of the "
        "reference writer's files, values bitwise compared with the run that was never stopped, in "
        "bfloat16",
    ]


def test_reports_without_real_jobs_have_no_such_words():
    assert main.proofs(report(("llama3", "keys.total", "pass"))) == ""
    assert main.proofs(report(("main:moe", "keys.total", "pass"))) == ""
