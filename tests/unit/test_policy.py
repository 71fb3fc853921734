"""What the failure of a task means for the job."""

from __future__ import annotations

import pytest

from tfdist.cluster.topology import Task
from tfdist.launch.policy import Policy
from tfdist.launch.policy import Reaction

CHIEF, PS, EVALUATOR = Task("chief", 0), Task("ps", 0), Task("evaluator", 0)
DATA = Task("data", 0)
ONE, TWO = Task("worker", 0), Task("worker", 1)
SERVERS = (CHIEF, ONE, TWO, PS)
FAIL, REPLACE, CARRY_ON = Reaction.FAIL, Reaction.REPLACE, Reaction.CARRY_ON


def test_tasks_that_train_together_fail_together():
    policy = Policy([ONE, TWO], max_restarts=2)
    assert policy.on_failure(TWO, 1, [ONE]) is FAIL
    assert [policy.start_again(TWO, 137) for _ in range(3)] == [1, 2, None]


def test_workers_beside_servers_are_replaced_each_so_often_and_then_done_without():
    policy = Policy(SERVERS, max_restarts=2)
    others = [CHIEF, ONE, PS]
    reactions = [policy.on_failure(TWO, 137, others) for _ in range(3)]
    assert reactions == [REPLACE, REPLACE, CARRY_ON]
    assert (policy.replacements(TWO), policy.replacements(ONE)) == (2, 0)
    assert [policy.on_failure(ONE, 1, [CHIEF, PS]) for _ in range(3)] == [REPLACE, REPLACE, FAIL]
    # Restarts of single workers take none from those of the job.
    assert policy.start_again(ONE, 1) == 1


@pytest.mark.parametrize(("failed", "code"), [(CHIEF, 1), (PS, 137), (ONE, 2)])
def test_others_beside_servers_end_the_job(failed, code):
    policy = Policy(SERVERS, max_restarts=1)
    assert policy.on_failure(failed, code, [t for t in SERVERS if t != failed]) is FAIL
    assert policy.start_again(failed, code) == (None if code == 2 else 1)


def test_servers_that_fail_when_the_coordinator_has_ended_do_not_matter():
    policy = Policy(SERVERS, max_restarts=1)
    assert policy.on_failure(PS, 1, [ONE]) is CARRY_ON
    assert policy.on_failure(ONE, 1, []) is CARRY_ON


@pytest.mark.parametrize("trainers", [(ONE,), SERVERS])
def test_an_evaluator_is_replaced_alone_and_never_repeats_the_training(trainers):
    policy = Policy([*trainers, EVALUATOR], max_restarts=1)
    assert [policy.on_failure(EVALUATOR, 1, trainers) for _ in range(2)] == [REPLACE, FAIL]
    assert policy.start_again(EVALUATOR, 1) is None
    assert Policy([ONE, EVALUATOR], 0).on_failure(EVALUATOR, 1, [ONE]) is FAIL


def test_processes_that_make_batches_are_started_again_and_never_end_the_job():
    policy = Policy([ONE, DATA], max_restarts=0)
    reactions = [policy.on_failure(DATA, 137, [ONE]) for _ in range(101)]
    assert reactions == [REPLACE] * 100 + [CARRY_ON]
    assert policy.most_replacements(DATA) == policy.replacements(DATA) == 100
    assert policy.on_failure(ONE, 1, [DATA]) is FAIL
