"""The guards' flags."""

import pytest

from toolkit.errors import UsageError
from toolkit.training.arguments import own_arguments


def test_guards_stop_by_default_and_a_slow_rank_is_only_warned_of():
    guards = own_arguments([]).guards
    assert (guards.guards, guards.guard_slow_rank) == ("stop", "warn")
    assert guards.guard_grad_norm == 100


def test_each_choice_is_the_user_s():
    flags = ["--guards", "warn", "--guard_grad_norm", "0", "--guard_slow_rank", "stop"]
    guards = own_arguments(flags).guards
    assert (guards.guards, guards.guard_slow_rank, guards.guard_grad_norm) == ("warn", "stop", 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--guards", "on"], "invalid choice: 'on'"),
        (["--guard_slow_rank", "off"], "invalid choice: 'off'"),
        (
            ["--guard_grad_norm", "0.5"],
            "--guard_grad_norm 0.5: a norm explodes when .* Use more than 1",
        ),
        (
            ["--guard_grad_norm", "nan"],
            "--guard_grad_norm nan: a norm explodes when .* Use more than 1",
        ),
        (
            ["--guard_grad_norm", "inf"],
            "--guard_grad_norm inf: a norm explodes when .* Use more than 1",
        ),
    ],
)
def test_what_means_nothing_is_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        own_arguments(flags)
