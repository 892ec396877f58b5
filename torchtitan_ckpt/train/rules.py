"""What no job can have: numbers out of range, degrees that do not fit the ranks or the model.

Everything wrong is said at once, before torch is imported and before a model exists. Rules between
checkpoint options are `torchtitan_ckpt.config.validate`'s, which is asked here as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields

from torchtitan_ckpt.config import validate
from torchtitan_ckpt.errors import ConfigError, Problem
from torchtitan_ckpt.parallel import ParallelDegrees
from torchtitan_ckpt.train.config import JobConfig
from torchtitan_ckpt.train.models.config import Qwen3Config


def check_job(job: JobConfig, world_size: int) -> ParallelDegrees:
    """The job's parallel degrees; ConfigError, with everything at once, where it cannot run.

    With `model` still None (to be read from `hf_assets_path`) its rules wait for a second call.
    """
    problems = [*_numbers(job), *_seed_problems(job, world_size)]
    try:
        validate(job.checkpoint, dump_folder=job.dump_folder, hf_assets_path=job.hf_assets_path)
    except ConfigError as error:
        problems += error.problems
    degrees = ParallelDegrees.from_options(asdict(job.parallelism))
    try:
        degrees = degrees.resolve(world_size)
    except ConfigError as error:
        problems += error.problems
    else:
        problems += _model_problems(job.model, degrees) if job.model else []
    if problems:
        raise ConfigError(*problems)
    return degrees


def _problem(code: str, what: str, *, expected: str = "", actual: str = "", fix: str) -> Problem:
    return Problem(code=f"train.{code}", what=what, expected=expected, actual=actual, fix=fix)


def _numbers(job: JobConfig) -> Iterator[Problem]:
    for name in ("steps", "seq_len", "local_batch_size"):
        value = getattr(job.training, name)
        if value < 1:
            yield _problem(
                "value",
                f"training.{name} cannot be {value}",
                expected="1 or more",
                actual=str(value),
                fix=f"--training.{name} 1",
            )
    if not 0.0 <= job.training.dropout < 1.0:
        yield _problem(
            "value",
            f"training.dropout cannot be {job.training.dropout}",
            expected="0 or more, less than 1",
            actual=str(job.training.dropout),
            fix="--training.dropout 0.1",
        )
    if job.parallelism.context_parallel_degree > 1:
        yield _problem(
            "no-context-parallel",
            "the reference job does not split sequences over ranks",
            expected="parallelism.context_parallel_degree 1",
            actual=str(job.parallelism.context_parallel_degree),
            fix="--parallelism.context_parallel_degree 1; parameters, and so checkpoints, are laid "
            "out as with that many more data-parallel shards",
        )


def _seed_problems(job: JobConfig, world_size: int) -> Iterator[Problem]:
    if not job.checkpoint.create_seed_checkpoint:
        return
    if not job.checkpoint.enable:
        yield _problem(
            "seed-disabled",
            "a seed checkpoint cannot be made while checkpoints are off",
            fix="add --checkpoint.enable",
        )
    if world_size > 1:
        yield _problem(
            "seed-world",
            "a seed checkpoint is made by one process",
            expected="NGPU=1",
            actual=f"{world_size} processes",
            fix="run the same command with NGPU=1; any number of ranks can load the seed",
        )
    split = {item.name: getattr(job.parallelism, item.name) for item in fields(job.parallelism)}
    above = {name: degree for name, degree in split.items() if degree > 1}
    if above:
        yield _problem(
            "seed-degrees",
            "a seed checkpoint is made unsplit",
            expected="every parallel degree 1",
            actual=", ".join(f"{name} {degree}" for name, degree in above.items()),
            fix=" ".join(f"--parallelism.{name} 1" for name in above),
        )


def _model_problems(model: Qwen3Config, degrees: ParallelDegrees) -> Iterator[Problem]:
    for name in ("num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(model, name) % degrees.tp:
            yield _problem(
                "tensor-degree",
                f"tensor parallelism cannot split {name}={getattr(model, name)} evenly",
                expected=f"a divisor of {getattr(model, name)}",
                actual=f"tensor_parallel_degree {degrees.tp}",
                fix="--parallelism.tensor_parallel_degree 1",
            )
    if degrees.ep > 1 and (not model.num_experts or model.num_experts % degrees.ep):
        yield _problem(
            "expert-degree",
            f"{model.num_experts} experts cannot be spread evenly over {degrees.ep} ranks",
            expected="a degree that divides num_experts",
            actual=f"expert_parallel_degree {degrees.ep}",
            fix="--parallelism.expert_parallel_degree 1",
        )
    stages = degrees.pp
    if stages > model.num_hidden_layers:
        yield _problem(
            "pipeline-degree",
            f"{model.num_hidden_layers} layers do not fill {stages} pipeline stages",
            expected=f"at most {model.num_hidden_layers}",
            actual=f"pipeline_parallel_degree {stages}",
            fix="--parallelism.pipeline_parallel_degree 1",
        )
    if stages > 1 and model.tie_word_embeddings:
        yield _problem(
            "pipeline-tied",
            "a tied embedding and head would lie on different pipeline stages",
            expected="pipeline_parallel_degree 1 with tie_word_embeddings",
            actual=f"pipeline_parallel_degree {stages}",
            fix="--parallelism.pipeline_parallel_degree 1",
        )
