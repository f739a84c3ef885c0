"""FSDP2's shards come back, and what would run code while they are read is refused."""

import io
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from toolkit.engines.fsdp_shards import LIST, ShardError, read_shards, write_shards
from toolkit.errors import UsageError


def states_of(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2, bias=False))
    model[1].to(torch.bfloat16)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for part in model:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 7)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, seed)
    optimizer.step()
    return {
        "model": dict(model.named_parameters()),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def values_of(states):
    """Return every leaf, tensors as lists."""
    if isinstance(states, dict):
        return {name: values_of(each) for name, each in states.items()}
    if isinstance(states, torch.Tensor):
        whole = states.full_tensor() if hasattr(states, "full_tensor") else states
        return whole.float().tolist()
    return states


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


class Attribute:
    """Pickled as Python 3.11.2 pickles the member of an enum."""

    def __init__(self, owner, name):
        self.asked = owner, name

    def __reduce__(self):
        return getattr, self.asked


@pytest.fixture
def saved(tmp_path, one_rank):
    write_shards(tmp_path / "sharded", states_of(1))
    return tmp_path / "sharded"


def test_all_that_was_written_comes_back(saved):
    states = states_of(2)
    assert values_of(states) != values_of(states_of(1))
    read_shards(saved, states)
    assert values_of(states) == values_of(states_of(1))


def test_a_list_of_shards_that_would_run_code_is_refused(saved, tmp_path):
    made = tmp_path / "made-by-the-pickle"
    found = pickle.loads((saved / LIST).read_bytes())
    found.planner_data = Evil(made)
    (saved / LIST).write_bytes(pickle.dumps(found))
    with pytest.raises(UsageError, match=r"would run code .* names posix\.mkdir. Resume only"):
        read_shards(saved, states_of(2))
    assert not made.exists()


def test_members_of_enums_are_read_as_every_python_pickles_them(saved):
    found = pickle.loads((saved / LIST).read_bytes())
    found.planner_data = Attribute(metadata._MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")
    (saved / LIST).write_bytes(pickle.dumps(found))
    states = states_of(2)
    read_shards(saved, states)
    assert values_of(states) == values_of(states_of(1))
    found.planner_data = Attribute(torch.Size, "mro")
    (saved / LIST).write_bytes(pickle.dumps(found))
    with pytest.raises(UsageError, match=r"would run code .* getattr of <class 'torch\.Size'>"):
        read_shards(saved, states_of(2))


def test_an_entry_of_a_shard_that_would_run_code_is_refused(saved, tmp_path):
    made = tmp_path / "made-by-the-pickle"
    written = io.BytesIO()
    torch.save(Evil(made), written)
    found = pickle.loads((saved / LIST).read_bytes())
    name = next(each for each in found.storage_data if each.fqn.endswith(".lr"))
    place = filesystem._StorageInfo("evil", 0, len(written.getvalue()))
    found.storage_data[name] = place
    (saved / "evil").write_bytes(written.getvalue())
    (saved / LIST).write_bytes(pickle.dumps(found))
    with pytest.raises(UsageError, match="would run code and were not loaded"):
        read_shards(saved, states_of(2))
    assert not made.exists()


def test_a_list_names_files_beside_it_alone(saved):
    found = pickle.loads((saved / LIST).read_bytes())
    for place in found.storage_data.values():
        place.relative_path = f"../sharded/{place.relative_path}"
    (saved / LIST).write_bytes(pickle.dumps(found))
    with pytest.raises(UsageError, match="is no file beside"):
        read_shards(saved, states_of(2))


def test_what_torch_reports_past_every_except_is_an_error_here(saved):
    """`CheckpointException` is no `Exception`, so nothing else in a rank would catch it."""
    assert not issubclass(CheckpointException, Exception)
    shutil.copy(saved / LIST, saved / "kept")
    for shard in saved.glob("*.distcp"):
        shard.write_bytes(b"")
    with pytest.raises(ShardError, match="rank 0: "):
        read_shards(saved, states_of(2))
    (saved / LIST).unlink()
    with pytest.raises(ShardError, match=r"FileNotFoundError: .*\.metadata"):
        read_shards(saved, states_of(2))
    (saved / "a file").write_text("")
    with pytest.raises(ShardError, match="rank 0: "):
        write_shards(saved / "a file" / "below", states_of(2))
