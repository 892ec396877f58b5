"""Which of file and running optimizer wins for a hyperparameter, through the manager's option."""

import pytest

from tests.files.toy import Job, bits
from torchtitan_ckpt.config import CheckpointConfig, ignored_options
from torchtitan_ckpt.errors import ConfigError, MismatchError


def saved_with(folder, **hyperparameters):
    with Job(folder) as job:
        job.optimizer.param_groups[0].update(hyperparameters)
        job.train(2)
    return job


def loaded_with(folder, keep, **hyperparameters):
    with Job(folder, seed=1, keep_hyperparameters=keep) as job:
        job.optimizer.param_groups[0].update(hyperparameters)
        assert job.manager.load()
        group, state = job.optimizer.param_groups[0], job.optimizer.state[job.model.up.weight]
        found = dict(group), {key: value.clone() for key, value in state.items()}
        job.train(3)  # the optimizer can step with what it got
    return found


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("keep", [[], ["amsgrad"]])
def test_amsgrad_switched_between_save_and_load(tmp_path, caplog, before, keep):
    first = saved_with(tmp_path, amsgrad=before)
    with caplog.at_level("INFO"):
        group, state = loaded_with(tmp_path, keep, amsgrad=not before)
    assert group["amsgrad"] is (not before if keep else before)
    assert ("max_exp_avg_sq" in state) is group["amsgrad"]
    if keep and not before:
        assert not state["max_exp_avg_sq"].any()
    held = first.optimizer.state[first.model.up.weight]
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert bits(state[key]) == bits(held[key])
    said = [r.message for r in caplog.records if "amsgrad" in r.message]
    switched = f"amsgrad switched {'off' if before else 'on'}"
    assert any((switched if keep else "as saved") in line for line in said)


def test_what_is_kept_stays_and_the_rest_is_the_files(tmp_path):
    saved_with(tmp_path, weight_decay=0.25, eps=0.5)
    group, _ = loaded_with(tmp_path, ["weight_decay"], weight_decay=0.75, eps=0.125)
    assert (group["weight_decay"], group["eps"]) == (0.75, 0.5)


def test_a_name_that_no_group_has_is_refused_and_nothing_changes(tmp_path):
    saved_with(tmp_path)
    with Job(tmp_path, seed=1, keep_hyperparameters=["weight_decy"]) as job:
        before = bits(job.model.up.weight)
        with pytest.raises(MismatchError, match="did you mean 'weight_decay'") as caught:
            job.manager.load()
        assert caught.value.problems[0].code == "optimizer.keep-unknown"
        assert bits(job.model.up.weight) == before
        assert not job.optimizer.state


def test_several_names_in_one_entry_are_told_the_right_form(tmp_path):
    with pytest.raises(ConfigError, match=r"keep_hyperparameters amsgrad,eps") as caught:
        Job(tmp_path, keep_hyperparameters=["amsgrad eps"])
    assert caught.value.problems[0].code == "config.keep-list"


def test_it_does_nothing_where_the_optimizer_is_not_loaded():
    config = CheckpointConfig(
        enable=True,
        keep_hyperparameters=["eps"],
        exclude_from_loading=["optimizer", "lr_scheduler"],
    )
    assert "keep_hyperparameters" in ignored_options(config)
