"""Evidence of rows: the same for the same row, whatever it shares a batch with."""

import accelerate
import pytest
import torch
from safetensors.torch import save_file

from toolkit.data.sampling_order import Collator
from toolkit.measuring.evidence import EvidenceKeeper, _rows
from toolkit.records.evidence import BEFORE_FILE
from toolkit.records.record import FILLER_ID

PAD = 0


def row(*texts, packed, number=0):
    """A row of texts; of each but a filler the first token is not learned, as in packed rows."""
    made = {
        "input_ids": [token for text in texts for token in text],
        "labels": [label for text in texts for label in (-100, *text[1:])],
        "sample_id": number,
    }
    places = [place for text in texts for place in range(len(text))]
    return made | ({"position_ids": places} if packed else {})


@pytest.mark.parametrize("packed", [False, True])
def test_padding_is_no_part_of_what_was_read(packed):
    collate = Collator(pad_token_id=PAD)
    # One ends as padding does but for its label, one is a filler, which is padding throughout.
    short, ends, long = ([5, 6], [7, 0]), ([3, PAD],), ([1, 2, 3, 4, 5], [6, 7])
    batch = [
        *(row(*texts, packed=packed) for texts in (short, ends, long)),
        row([PAD], packed=packed, number=FILLER_ID),
    ]
    together = _rows(collate(batch), None)
    alone = [_rows(collate([each]), None)[0] for each in batch]
    assert together == alone
    assert len({each["tokens"] for each in together}) == 4
    assert len({each["labels"] for each in together}) == 4
    without_its_end = _rows(collate([row([3], packed=packed)]), None)[0]
    assert together[1]["tokens"] != without_its_end["tokens"]


@pytest.mark.parametrize(("dtype", "taken"), [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_that_are_not_taken_to_the_bit_end_the_run(tmp_path, dtype, taken):
    model = torch.nn.Linear(3, 2, bias=False, dtype=dtype)
    weights = torch.full((2, 3), 1 + 2**-20)  # bf16 holds none of them
    (tmp_path / "other").mkdir()
    save_file({"weight": weights}, tmp_path / "other" / BEFORE_FILE)
    keeper = EvidenceKeeper(
        tmp_path / "own",
        step=1,
        weights=tmp_path / "other",
        strategy="single",
        engine="loop",
        precision="no",
    )
    arguments = accelerate.Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), 0.1)
    try:
        if taken:
            keeper.prepared(*arguments)
            assert torch.equal(model.weight, weights)
        else:
            with pytest.raises(RuntimeError, match="weight did not take the weights that .* holds"):
                keeper.prepared(*arguments)
    finally:
        keeper.close()
