import json
import socket

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, List, Value
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from toolkit.data import building, sources
from toolkit.data.arguments import DataArguments
from toolkit.data.building import LONGEST_ROW
from toolkit.data.dataset import prepare_data
from toolkit.data.sampling_order import Collator
from toolkit.data.sources import standard_library_hash, standard_library_texts
from toolkit.data.tokens import (
    Tally,
    load_tokenizer,
    supervised_tokens,
    tokenise,
    tokenizer_identity,
)
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.training.arguments import ModelArguments
from toolkit.training.model import resolve_tokenizer

WORDS = ["</s>", "a", "b", "c", "d", "e", "f"]
EOS, A, B, C, D, E, F = range(7)


@pytest.fixture
def tokenizer():
    """One id a word; like GPT-2's, its end of text is also its padding."""
    words = {word: number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")


@pytest.fixture
def tokenizer_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_a_tokenizer_changes_with_its_files_and_templates_and_with_no_others(tokenizer_folder):
    templates = tokenizer_folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ messages }}")
    before = tokenizer_identity(tokenizer_folder)
    for name in ("model.safetensors", "README.md", "additional_chat_templates/notes.txt"):
        (tokenizer_folder / name).write_text("of something else")
    assert tokenizer_identity(tokenizer_folder) == before
    (templates / "tool_use.jinja").write_text("{{ messages[0] }}")
    other_template = tokenizer_identity(tokenizer_folder)
    (tokenizer_folder / "tokenizer_config.json").write_text("{}")
    assert len({before, other_template, tokenizer_identity(tokenizer_folder)}) == 3


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))


def pairs(tokenizer, *rows, max_length=8):
    batch = {"prompt": [row[0] for row in rows], "completion": [row[1] for row in rows]}
    return tokenise(
        batch,
        range(len(rows)),
        tokenizer=tokenizer,
        columns=("prompt", "completion"),
        max_length=max_length,
    )


def texts(tokenizer, *rows, max_length=8):
    return tokenise(
        {"text": rows},
        range(len(rows)),
        tokenizer=tokenizer,
        columns=("text",),
        max_length=max_length,
    )


# Tokens and labels


def test_only_the_completion_and_the_end_are_learned(tokenizer):
    rows = pairs(tokenizer, ("a b ", "c d"))
    assert rows["input_ids"] == [[A, B, C, D, EOS]]
    assert rows["labels"] == [[IGNORED, IGNORED, C, D, EOS]]


def test_all_of_a_text_is_learned(tokenizer):
    rows = texts(tokenizer, "a b")
    assert rows["input_ids"] == rows["labels"] == [[A, B, EOS]]


def test_the_end_is_not_appended_twice(tokenizer):
    assert texts(tokenizer, "a b </s>")["input_ids"] == [[A, B, EOS]]


def test_a_token_that_reaches_into_the_completion_is_learned(tokenizer):
    rows = pairs(tokenizer, ("a b", "c d"))
    assert rows["input_ids"] == [[A, EOS, D, EOS]]  # "bc" is unknown
    assert rows["labels"] == [[IGNORED, EOS, D, EOS]]


def test_long_rows_are_cut_and_lose_their_end(tokenizer):
    rows = pairs(tokenizer, ("a b ", "c d e f"), max_length=4)
    assert rows["input_ids"] == [[A, B, C, D]]
    assert rows["labels"] == [[IGNORED, IGNORED, C, D]]


def test_rows_without_a_learned_token_are_left_out_and_keep_their_numbers(tokenizer):
    rows = pairs(
        tokenizer,
        ("a b c d ", "e"),  # cut before the completion
        ("a ", "b"),
        ("a b ", "  "),
        ("a ", None),
        (None, "b c"),
        max_length=4,
    )
    assert rows["sample_id"] == [1, 4]
    assert rows["labels"] == [[IGNORED, B, EOS], [B, C, EOS]]


def test_text_without_a_token_is_left_out_and_not_trained_as_its_end_alone(tokenizer):
    tally = Tally()
    rows = tokenise(
        {"prompt": ["a", "a", ""], "completion": ["", "\u00ad x", "y"]},
        range(3),
        tokenizer=tokenizer,
        columns=("prompt", "completion"),
        max_length=8,
        tally=tally,
    )
    assert rows["sample_id"] == []  # "x" and "y" are unknown, and the first has no completion
    assert tally.without_tokens == 2


def test_the_first_token_is_never_predicted():
    assert supervised_tokens([A, IGNORED]) == 0
    assert supervised_tokens([IGNORED, A, B]) == 2


# Collator


def test_padding_is_masked_by_position_and_the_end_stays_learned(tokenizer):
    rows = pairs(tokenizer, ("a ", "b c"), ("a ", "b"))
    collate = Collator(pad_token_id=tokenizer.pad_token_id)
    batch = collate(Dataset.from_dict(rows).to_list())
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    assert batch["input_ids"].tolist() == [[A, B, C, EOS], [A, B, EOS, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[IGNORED, B, C, EOS], [IGNORED, B, EOS, IGNORED]]
    assert batch["sample_id"].tolist() == [0, 1]
    assert {str(column.dtype) for column in batch.values()} == {"torch.int64"}


# Files


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows, separator=","):
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    path.write_text("".join(separator.join(line) + "\n" for line in lines))


WRITERS = {
    "jsonl": write_jsonl,
    "json": lambda path, rows: path.write_text(json.dumps(rows)),
    "csv": write_csv,
    "tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "parquet": lambda path, rows: pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(kind, tmp_path, own_cache, tokenizer_folder):
    rows = [{"prompt": "a b ", "completion": "c"}, {"prompt": "a ", "completion": "d e"}]
    path = tmp_path / f"rows.{kind}"
    WRITERS[kind](path, rows)
    prepared = prepare_data(DataArguments(train_file=str(path)), tokenizer_folder)
    assert prepared.load().to_list() == [
        {
            "input_ids": [A, B, C, EOS],
            "labels": [IGNORED, IGNORED, C, EOS],
            "sample_id": 0,
        },
        {"input_ids": [A, D, E, EOS], "labels": [IGNORED, D, E, EOS], "sample_id": 1},
    ]
    assert prepared.facts() == {
        "name": path.name,
        # The same for each kind of file: it is the text that is hashed.
        "hash": "05254b32e7217b9c3b2b358ec55439c3674c2193807abf02fd750ea070c129f2",
        "tokens_hash": prepared.tokens_hash,
        "rows": 2,
        "dropped": 0,
        "dropped_why": {},
        "columns": ["prompt", "completion"],
        "unread_columns": [],
        "python": None,
        "format": "prompt and completion",
        "loss_on": "completion",
        "template": None,
        "packing": "none",
        "texts": 2,
        "truncated": 0,
        "lost_tokens": 0,
        "longest_text": 4,
        "longest": 4,
        "tokens": 8,
        "supervised_tokens": 5,
        "stop_token": WORDS[EOS],
        "rows_with_stop": 2,
        "asked": {"train_file": str(path)},
    }


def test_a_text_file_is_a_row_a_line(tmp_path, own_cache, tokenizer_folder):
    path = tmp_path / "rows.txt"
    path.write_text("a b\n\nc\n")
    prepared = prepare_data(DataArguments(train_file=str(path)), tokenizer_folder)
    assert prepared.load()["input_ids"][:] == [[A, B, EOS], [C, EOS]]
    assert prepared.load()["sample_id"][:] == [0, 2]
    assert prepared.dropped == 1


def test_another_column_and_fewer_rows_can_be_asked_for(tmp_path, own_cache, tokenizer_folder):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"text": "a", "story": word} for word in ("b b", "c c", "d d")])
    arguments = DataArguments(train_file=str(path), text_column="story", max_train_samples=2)
    prepared = prepare_data(arguments, tokenizer_folder)
    assert prepared.load()["input_ids"][:] == [[B, B, EOS], [C, C, EOS]]


def test_rows_that_the_tokenizer_has_no_token_for_are_refused_as_that(
    tmp_path, own_cache, tokenizer_folder
):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"text": "x"}, {"text": "y z"}, {"text": ""}])
    arguments = DataArguments(train_file=str(path))
    with pytest.raises(UsageError, match="no token for the text of 2 of its 3 rows") as refusal:
        prepare_data(arguments, tokenizer_folder)
    assert f"the tokenizer in {tokenizer_folder}" in str(refusal.value)
    assert "Pass --tokenizer_name" in str(refusal.value)
    assert "--max_length" not in str(refusal.value)


def test_rows_in_the_cache_are_checked_against_each_model_s_vocabulary(
    tmp_path, own_cache, tokenizer_folder
):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"text": "a"}])
    arguments = DataArguments(train_file=str(path))
    prepare_data(arguments, tokenizer_folder, vocab_size=len(WORDS))
    with pytest.raises(UsageError, match="has 7 tokens and the model 15 ids: .*--tokenizer_name"):
        prepare_data(arguments, tokenizer_folder, vocab_size=15)
    assert prepare_data(arguments, tokenizer_folder, vocab_size=14).rows == 1


def test_a_changed_file_is_read_again(tmp_path, own_cache, tokenizer_folder):
    path = tmp_path / "rows.jsonl"
    hashes = set()
    for word in ("a a", "b b"):
        write_jsonl(path, [{"text": word}])
        hashes.add(prepare_data(DataArguments(train_file=str(path)), tokenizer_folder).hash)
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.jsonl", '{"q": "a", "n": 1}\n', "columns are: q, n. .*--text_column"),
        ("rows.jsonl", '{"text": ["a"]}\n', "'text' .* not text.*chat template.*--text_column"),
        ("rows.jsonl", '{"text": "a"}\n{"text": \n', "can't be read as json.*Correct the file"),
        ("rows.jsonl", "", "zero training rows.*Pass a file"),
        ("rows.csv", "text\n", "zero training rows"),
        ("rows.json", "[]", "zero training rows"),
        ("rows.txt", "\n\n", "zero training rows.*none of its 2 rows.*--max_length"),
        ("rows.doc", "a", "ends in '.doc': use a file that ends in one of .jsonl"),
    ],
)
def test_files_without_rows_to_train_on(name, content, says, tmp_path, own_cache, tokenizer_folder):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError, match=says):
        prepare_data(DataArguments(train_file=str(path)), tokenizer_folder)
    assert not list((tmp_path / "cache").glob("tokens/*/facts.json"))


NESTED = b'{"text": "a", "x": ' + 900 * b'{"a": ' + b"1" + 901 * b"}" + b"\n"
DEEP = b'{"text": "a", "x": ' + 100_000 * b"[" + 100_000 * b"]" + b"}\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.jsonl", b'{"text": "a"}\n{"text": "na\xefve"}\n', "Line 2 of .*byte 13 .*0xef"),
        ("rows.csv", b"text\nna\xefve\n", "Line 2 of .*byte 3 .*0xef.*iconv"),
        ("rows.txt", "a".encode("utf-16"), "Line 1 of .*not UTF-8"),
        ("rows.jsonl", NESTED, "Line 1 of .* nests more than 100 levels"),
        ("rows.json", b"[\n\n" + DEEP.replace(b"\n", b"") + b"]", "Line 3 of .* nests more"),
        ("rows.jsonl", b'{"text": "[[[\\"[[["}\n' + DEEP, "Line 2 of .* nests more than 100"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_lines_that_no_library_survives_are_named(
    name, content, says, streaming, tmp_path, own_cache, tokenizer_folder
):
    path = tmp_path / name
    path.write_bytes(content)
    arguments = DataArguments(train_file=str(path), streaming=streaming, max_train_samples=2)
    with pytest.raises(UsageError, match=says):
        prepare_data(arguments, tokenizer_folder)


def test_rows_of_a_folder_that_cannot_be_read_are_no_traceback(
    tmp_path, own_cache, tokenizer_folder
):
    for number, (content, says) in enumerate(
        [(b'{"text": "na\xefve"}\n', "text that is not UTF-8"), (NESTED, "more levels of lists")]
    ):
        folder = tmp_path / f"set{number}"
        folder.mkdir()
        (folder / "train.jsonl").write_bytes(content)
        for streaming in (False, True):
            arguments = DataArguments(
                dataset_name=str(folder), streaming=streaming, max_train_samples=1
            )
            with pytest.raises(UsageError, match=says):
                prepare_data(arguments, tokenizer_folder)


def test_brackets_in_texts_and_many_messages_are_no_levels(tmp_path, own_cache, tokenizer_folder):
    path = tmp_path / "rows.jsonl"
    text = "a " + 500 * '[ { \\ " '
    write_jsonl(path, [{"text": text, "notes": [{"x": [number]} for number in range(300)]}])
    assert prepare_data(DataArguments(train_file=str(path)), tokenizer_folder).rows == 1


def test_a_row_that_would_take_all_memory_is_refused_with_its_number_and_size(
    tmp_path, own_cache, tokenizer_folder
):
    path, long = tmp_path / "rows.jsonl", "a " * (LONGEST_ROW // 2)
    chat = [{"role": "user", "content": long}, {"role": "assistant", "content": "b"}]
    for rows, length in (
        ([{"text": "a"}, {"text": f"{long}b"}], "4,194,305"),
        (
            [{"messages": [{"role": "user", "content": "a"}, chat[1]]}, {"messages": chat}],
            "4,194,3",
        ),
    ):
        write_jsonl(path, rows)
        with pytest.raises(UsageError, match=f"Row 1 of rows.jsonl has {length}.*--packing fixed"):
            prepare_data(DataArguments(train_file=str(path)), tokenizer_folder)


def test_long_rows_are_tokenised_few_at_a_time_to_the_same_tokens(
    tmp_path, own_cache, tokenizer_folder, monkeypatch
):
    path, batches = tmp_path / "rows.jsonl", []

    def counted(batch, numbers, **options):
        batches.append(len(numbers))
        return tokenise(batch, numbers, **options)

    monkeypatch.setattr(building, "tokenise", counted)
    write_jsonl(path, [{"text": f"a b {'c ' * 1000}"}] * 40)
    arguments = DataArguments(train_file=str(path))
    whole = prepare_data(arguments, tokenizer_folder)
    monkeypatch.setattr(building, "BATCH_BYTES", 10_000)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "another"))
    assert prepare_data(arguments, tokenizer_folder).tokens_hash == whole.tokens_hash
    assert batches[0] == 40 > 5 > max(batches[1:])


def test_rows_that_were_left_out_or_cut_are_named(tmp_path, own_cache, tokenizer_folder):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"text": "a b c d"}, {"text": "a"}, {"text": ""}])
    left_out, cut = prepare_data(
        DataArguments(train_file=str(path), max_length=3), tokenizer_folder
    ).notes()
    assert left_out.startswith("rows.jsonl: 1 of 3 rows are left out")
    assert cut.startswith("rows.jsonl: 1 of 2 texts are cut to --max_length")


def test_the_built_in_data_are_cut_without_a_word(cache):
    built_in_rows = prepare_data(DataArguments(), resolve_tokenizer(ModelArguments()))
    assert built_in_rows.truncated
    assert built_in_rows.notes() == []


def test_missing_files_and_data_sets(tmp_path, own_cache, tokenizer_folder, monkeypatch):
    with pytest.raises(UsageError, match="rows.csv is not there: check the path"):
        prepare_data(DataArguments(train_file=str(tmp_path / "rows.csv")), tokenizer_folder)
    with pytest.raises(UsageError, match="holds tokenizer: a folder holds text alone"):
        prepare_data(DataArguments(train_file=str(tmp_path)), tokenizer_folder)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="'no/such' can't be loaded.*--train_file"):
        prepare_data(DataArguments(dataset_name="no/such"), tokenizer_folder)


def test_a_data_set_of_the_hub_is_read_through_datasets(
    monkeypatch, tmp_path, own_cache, tokenizer_folder
):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return Dataset.from_list([{"text": "a b"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    arguments = DataArguments(dataset_name="some/set", dataset_config_name="v1")
    prepared = prepare_data(arguments, tokenizer_folder)
    assert asked == [("some/set", "v1", "train")]
    assert (prepared.name, prepared.rows) == ("some/set", 1)


# The built-in data


def test_the_built_in_data_are_signatures_and_docstrings(cache):
    rows = standard_library_texts()
    assert all(list(row) == ["prompt", "completion"] for row in rows)
    assert len(rows) > 2000
    commonprefix = next(row for row in rows if row["prompt"] == "def commonprefix(m):\n")
    assert commonprefix["completion"].startswith("Given a list of pathnames")
    assert not any(row["prompt"].startswith(("def _", "async def _")) for row in rows)
    assert all(row["completion"] for row in rows)


def test_a_python_without_sources_is_told_the_way_out(monkeypatch, own_cache, tmp_path):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match="without the sources.*--train_file"):
        standard_library_texts()


def test_the_built_in_data_and_tokenizer_need_no_network(cache, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"the network was asked for: {arguments}")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    folder = resolve_tokenizer(ModelArguments())
    load_tokenizer(folder)
    prepared = prepare_data(DataArguments(), folder)
    assert prepared.rows == len(prepared.load()) > 2000
    assert prepared.hash == standard_library_hash()


def test_tokenising_twice_gives_the_same_tokens(cache, monkeypatch, tmp_path):
    folder = resolve_tokenizer(ModelArguments())
    arguments = DataArguments(max_train_samples=200, max_length=128)
    first = prepare_data(arguments, folder)
    assert prepare_data(arguments, folder) == first
    assert first.load().features == {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "sample_id": Value("int64"),
    }
    rows = tmp_path / "rows.jsonl"
    write_jsonl(rows, standard_library_texts()[:200])
    again = prepare_data(DataArguments(train_file=str(rows), max_length=128), folder)
    assert (again.hash, again.tokens_hash) == (first.hash, first.tokens_hash)
