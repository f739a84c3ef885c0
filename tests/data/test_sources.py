"""Sources that are read in part: streams, and rows kept for validation."""

import json
import os
import sys
from unittest.mock import Mock

import pytest
from accelerate.state import PartialState
from datasets import Dataset, are_progress_bars_disabled

from toolkit.data.arguments import DataArguments
from toolkit.data.building import Build
from toolkit.data.dataset import prepare_data, prepare_validation
from toolkit.data.sources import quiet_progress
from toolkit.errors import UsageError
from toolkit.launching.preflight import prepare_once
from toolkit.training.flags import checked_flags
from toolkit.training.job import checked_job
from toolkit.training.model import build_model
from toolkit.training.preflight import preflight


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count):
    return [{"text": f"row number {number}"} for number in range(count)]


def texts(data):
    """The text of each row, so that rows of different data sets can be told apart."""
    return [tuple(ids) for ids in data.load()["input_ids"]]


# Streaming


def test_a_stream_gives_the_first_rows_as_the_whole_file_does(tmp_path, cache):
    path, folder = write_rows(tmp_path / "rows.jsonl", numbered(30)), build_model()
    whole = prepare_data(DataArguments(train_file=path, max_train_samples=7), folder)
    streamed = DataArguments(train_file=path, streaming=True)
    by_need = prepare_data(streamed, folder, rows_needed=7)
    by_flag = prepare_data(
        DataArguments(train_file=path, streaming=True, max_train_samples=7), folder, rows_needed=99
    )
    assert whole.tokens_hash == by_need.tokens_hash == by_flag.tokens_hash
    assert by_need.rows == 7


def test_what_lies_behind_the_rows_that_are_needed_is_not_read(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"text": "row " * 300}] * 28_000)  # more than `datasets` reads ahead
    with path.open("a") as file:
        file.write('{"text": \n')
    folder = build_model()
    arguments = DataArguments(train_file=str(path), streaming=True)
    assert prepare_data(arguments, folder, rows_needed=5).rows == 5
    with pytest.raises(UsageError, match="can't be read as json"):
        prepare_data(DataArguments(train_file=str(path)), folder)


def test_a_changed_file_is_streamed_again(tmp_path, cache):
    folder = build_model()
    arguments = DataArguments(train_file=str(tmp_path / "rows.jsonl"), streaming=True)
    made = set()
    for number, words in enumerate(("a a", "b b")):
        path = write_rows(tmp_path / "rows.jsonl", [{"text": words}] * 3)
        os.utime(path, ns=(number, number))
        made.add(prepare_data(arguments, folder, rows_needed=2).tokens_hash)
    assert len(made) == 2


def test_chats_are_streamed_too(tmp_path, cache):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": chat}] * 3)
    folder = build_model()
    arguments = DataArguments(train_file=path, streaming=True)
    streamed = prepare_data(arguments, folder, rows_needed=3)
    assert streamed.tokens_hash == prepare_data(DataArguments(train_file=path), folder).tokens_hash


def test_a_data_set_in_a_folder_is_streamed_as_one_of_the_hub(tmp_path, cache):
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train.jsonl", numbered(30))
    arguments = DataArguments(dataset_name=str(tmp_path / "set"), streaming=True)
    streamed = prepare_data(arguments, build_model(), rows_needed=4)
    assert streamed.rows == 4
    write_rows(tmp_path / "set" / "train.jsonl", [{"text": "another"}] * 9)
    assert prepare_data(arguments, build_model(), rows_needed=4).tokens_hash != streamed.tokens_hash


def test_more_rows_of_a_stream_hold_more_rows_for_validation(tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", numbered(300))
    for where in ({"train_file": path}, {"dataset_name": str(tmp_path)}):
        options = where | {"streaming": True, "validation_split_percentage": 20}
        made = [
            prepare_validation(
                DataArguments(**options, max_train_samples=limit, max_eval_samples=200),
                build_model(),
            )
            for limit in (30, 300)
        ]
        assert made[0].rows < 20 < made[1].rows


def test_a_stream_without_an_end_in_sight_is_refused(tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", numbered(100))
    flags = ["--train_file", path, "--streaming", "True"]
    with pytest.raises(UsageError, match="nothing says how many: pass --max_train_samples"):
        preflight([*flags, "--num_train_epochs", "1"], num_processes=2)
    with pytest.raises(UsageError, match="--num_processes of the launch"):
        preflight([*flags, "--max_steps", "2"])
    facts = preflight([*flags, "--max_steps", "2"], num_processes=3)
    assert facts["data"]["rows"] == 2 * 4 * 2 * 3
    with pytest.raises(UsageError, match="--streaming needs"):
        preflight(["--streaming", "True"])


def test_the_cache_keeps_the_rows_and_not_what_they_were_made_of(tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", numbered(11))
    for options in ({}, {"streaming": True, "max_train_samples": 5}, {"packing": "best_fit"}):
        made = prepare_data(DataArguments(train_file=path, **options), build_model())
        names = sorted(each.name for each in made.folder.iterdir())
        assert names == ["facts.json", "manifest.json", "rows"]
        assert len(made.load()) == made.rows


def test_a_preparation_that_a_signal_ended_says_so(tmp_path, cache, capfd):
    """The files of a folder are not looked through: Arrow's parser crashes on this one."""
    (tmp_path / "train.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(SystemExit) as ended:
        prepare_once(["--dataset_name", str(tmp_path)])
    assert ended.value.code == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("toolkit: Preparing model and data was ended by SIGSEGV")


# Validation


def test_validation_rows_come_from_a_file_of_their_own_and_are_not_packed(tmp_path, cache):
    train = write_rows(tmp_path / "train.jsonl", numbered(20))
    other = write_rows(tmp_path / "other.jsonl", [{"text": f"other {n}"} for n in range(5)])
    arguments = DataArguments(
        train_file=train, validation_file=other, packing="best_fit", max_eval_samples=3
    )
    folder = build_model()
    validation = prepare_validation(arguments, folder)
    assert (validation.name, validation.rows, validation.packing) == ("other.jsonl", 3, "none")
    assert validation.load().column_names == ["input_ids", "labels", "sample_id"]
    assert prepare_data(arguments, folder).rows < 20
    assert prepare_validation(DataArguments(train_file=train), folder) is None


def test_a_percentage_parts_the_rows_and_does_not_move_with_their_number(tmp_path, cache):
    folder = build_model()
    held_out = []
    for count in (200, 300):
        path = write_rows(tmp_path / f"{count}.jsonl", numbered(count))
        arguments = DataArguments(train_file=path, validation_split_percentage=10)
        training, validation = (
            prepare_data(arguments, folder),
            prepare_validation(arguments, folder),
        )
        trained, kept = set(texts(training)), set(texts(validation))
        assert not trained & kept
        assert len(trained | kept) == training.rows + validation.rows == count
        ids = sorted([*training.load()["sample_id"], *validation.load()["sample_id"]])
        assert ids == list(range(count))
        held_out.append(kept)
    assert held_out[0] <= held_out[1]
    assert 20 <= len(held_out[1]) <= 45


def test_equal_rows_are_not_on_both_sides(tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", numbered(50) * 3)
    arguments = DataArguments(train_file=path, validation_split_percentage=20)
    folder = build_model()
    training, validation = prepare_data(arguments, folder), prepare_validation(arguments, folder)
    assert not set(texts(training)) & set(texts(validation))
    assert validation.rows % 3 == 0


def test_a_split_of_a_data_set_is_read_beside_its_training_split(monkeypatch, tmp_path, cache):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append(split)
        return Dataset.from_list([{"text": split}] * 3)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    arguments = DataArguments(dataset_name="some/set", validation_split="test")
    folder = build_model()
    training, validation = prepare_data(arguments, folder), prepare_validation(arguments, folder)
    assert asked == ["train", "test"]
    assert training.hash != validation.hash


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"validation_file": "a.txt", "validation_split_percentage": 5}, "exclude each other"),
        ({"validation_split": "test"}, "needs --dataset_name"),
        ({"validation_split_percentage": 0}, "between 0 and 100"),
        ({"validation_split_percentage": 100}, "between 0 and 100"),
        ({"max_eval_samples": 5}, "rows to evaluate on"),
    ],
)
def test_flags_that_name_no_validation_rows(options, says):
    with pytest.raises(UsageError, match=says):
        DataArguments(**options)


def test_an_empty_value_names_no_validation_rows():
    assert not DataArguments(validation_file="").has_validation


def test_a_percentage_that_leaves_nothing_is_told(tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", numbered(3))
    arguments = DataArguments(train_file=path, validation_split_percentage=0.001)
    with pytest.raises(UsageError, match="leaves zero validation rows of the 3"):
        prepare_validation(arguments, build_model())


def test_what_is_prepared_has_both_parts(tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", numbered(200))
    facts = preflight(["--train_file", path, "--validation_split_percentage", "10"])
    assert facts["data"]["rows"] + facts["validation"]["rows"] == 200
    assert facts["validation"]["format"] == "text"


# Before any process group


class Tokenising(Exception):
    pass


def test_tokenising_in_a_rank_is_before_there_is_a_group_to_time_out(tmp_path, cache, monkeypatch):
    """One rank of two, and no other: whatever waited for its neighbour would wait here."""
    path = write_rows(tmp_path / "rows.jsonl", numbered(30))
    build_model()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("toolkit.training.request.rehearse_if_needed", lambda: True)
    state = {}
    monkeypatch.setattr(PartialState, "_shared_state", state)
    groups = Mock(side_effect=AssertionError("a group was asked for"))
    monkeypatch.setattr("torch.distributed.init_process_group", groups)
    monkeypatch.setattr(Build, "write", Mock(side_effect=Tokenising))
    flags = checked_flags(["--train_file", path, "--output_dir", str(tmp_path / "output")])
    with pytest.raises(Tokenising):
        checked_job(flags)
    assert state == {}


def test_progress_bars_are_off_only_as_long_as_data_are_read_into_a_log(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with quiet_progress():
        assert are_progress_bars_disabled()
    assert not are_progress_bars_disabled()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with quiet_progress():
        assert not are_progress_bars_disabled()
