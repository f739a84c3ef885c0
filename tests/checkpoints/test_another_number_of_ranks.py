"""A checkpoint goes on with another number of ranks, or is refused by its and the launch's."""

import pytest
from killing import Run

from toolkit import environment
from toolkit.checkpoints.atomic_folder import atomic_folder
from toolkit.checkpoints.resume_request import ResumeRequest
from toolkit.checkpoints.resuming import find_checkpoint
from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES

SAVED = 1
FLAGS = (
    *("--max_length", 32, "--max_train_samples", 24, "--dropout", "off", "--max_steps", 2),
    *("--save_steps", SAVED, "--save_total_limit", 3, "--gradient_accumulation_steps", 2),
)


@pytest.fixture
def run_on(tmp_path, launch_environment, llama_of_fours):
    def make(strategy, ranks, *flags, name=None):
        return Run(
            *(strategy, "loop", tmp_path / (name or f"on-{ranks}"), launch_environment),
            ("--model_name_or_path", llama_of_fours, *FLAGS, *flags),
            ranks=ranks,
            # One group in any launch, so that all of them read the same rows.
            tensor_size=ranks if strategy == "tensor" else None,
        )

    return make


def test_ranks_that_share_rows_go_on_with_more_or_fewer_of_them(run_on):
    runs = {ranks: run_on("context", ranks) for ranks in (2, 4)}
    for run in runs.values():
        run.go()
    for writers, readers in ((2, 4), (4, 2)):
        wrote = runs[writers]
        resumed = run_on("context", readers, name=f"{writers}-to-{readers}")
        said = resumed.go("--resume_from_checkpoint", wrote.output / f"checkpoint-{SAVED}")
        assert f"{writers} ranks under context wrote that checkpoint; {readers} ranks under" in said
        assert resumed.first_step() == SAVED + 1
        ours, theirs = resumed.tail(SAVED), wrote.tail(SAVED)
        for measured in ("losses", "grad_norms"):
            assert ours[measured] == pytest.approx(theirs[measured], rel=1e-5), measured
        assert ours["sample_ids"] == theirs["sample_ids"]
        assert ours["learning_rates"] == theirs["learning_rates"]


@pytest.mark.parametrize("strategy", ["pipeline", "tensor", "ulysses"])
def test_what_another_number_cannot_read_is_refused_by_both_numbers(run_on, strategy):
    if (missing := environment.missing_for(STRATEGIES[strategy])) is not None:
        pytest.skip(missing)
    asked = ("--strategy", strategy) if strategy == "pipeline" else ()
    wrote = run_on(strategy, 2, *asked)
    wrote.go()
    other = run_on(strategy, 4, *asked)
    checkpoint = wrote.output / f"checkpoint-{SAVED}"
    code, said = other.end(other.start("--resume_from_checkpoint", checkpoint))
    assert code == 1  # of `accelerate launch`, whatever its ranks end with
    assert "world size is 2 in the checkpoint and 4 now" in said
    assert "number of ranks that read rows" not in said  # one sentence, with both numbers
    assert "exitcode  : 2" in said
    assert "exitcode  : 1" not in said
    assert "elete" not in said
    assert not list(other.output.glob("*"))


@pytest.mark.parametrize("any_ranks", [True, False])
def test_an_older_checkpoint_told_the_ranks_that_read_rows_and_its_files_tell_all(
    tmp_path, any_ranks
):
    described = {"kind": "checkpoint", "format": 1, "step": 4, "facts": {"num_processes": 1}}
    with atomic_folder(tmp_path / "checkpoint-4", **described) as draft:
        for rank in range(2):
            (draft / f"rank-{rank}.pt").write_bytes(b"states")
    request = ResumeRequest(tmp_path)

    def found(ranks, readers):
        now = {"num_processes": ranks, "data_parallel_size": readers}
        return find_checkpoint(request, now, any_ranks=any_ranks)

    assert found(2, 1).step == 4
    with pytest.raises(UsageError) as error:
        found(4, 2)
    assert "another training: world size is 2 in the checkpoint and 4 now. Resume" in str(
        error.value
    )
    with pytest.raises(UsageError, match="read rows of their own is 1 in the checkpoint and 2"):
        found(2, 2)
    if any_ranks:
        assert found(4, 1).step == 4
    else:
        with pytest.raises(UsageError, match="world size is 2 in the checkpoint and 4 now"):
            found(4, 1)
