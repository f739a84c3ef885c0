"""The table of GPUs: what it says, what it is called, and how others are added."""

import json
import re

import pytest
from speed_rows import ROWS

from toolkit.errors import UsageError
from toolkit.planning.plan import plan
from toolkit.planning.speed.estimate import MOST_MEASURED
from toolkit.planning.speed.gpus import EXAMPLE, built_in_gpus, gpu, read_gpus

GIB = 1 << 30

GPUS = built_in_gpus()
ASKED_FOR = [
    "T4",
    "V100-16GB",
    "V100-32GB",
    "A10G",
    "L4",
    "L40S",
    "RTX 3090",
    "RTX 4090",
    "RTX 5090",
    "A100-40GB",
    "A100-80GB",
    "H100",
    "H200",
    "B200",
    "A30",
    "A40",
    "L40",
    "H20",
    "H800",
    "B300",
    "RTX 3060",
    "RTX 3060 Ti",
    "RTX 3070",
    "RTX 3080-10GB",
    "RTX 3080-12GB",
    "RTX 4060",
    "RTX 4060 Ti-16GB",
    "RTX 4070",
    "RTX 4070 Ti Super",
    "RTX 4080",
    "RTX 5060",
    "RTX 5060 Ti-16GB",
    "RTX 5070",
    "RTX 5070 Ti",
    "RTX 5080",
]


def test_the_table_has_what_people_rent():
    assert set(ASKED_FOR) <= set(GPUS)


@pytest.mark.parametrize("card", GPUS.values(), ids=GPUS)
def test_every_entry_is_sourced_and_hangs_together(card):
    assert card.source
    assert card.memory_source
    assert (card.matmul_share is None) == (card.matmul_source == "")
    assert card.has_bf16 == (card.compute_capability >= (8, 0)) == (card.bf16_flops is not None)
    assert card.fp32_flops < card.fp16_flops
    if card.bf16_flops is not None:
        # Tensor cores take bf16 and fp16 at one rate, TF32 at half of it, on every card here.
        assert card.bf16_flops == card.fp16_flops
        assert card.tf32_flops / card.bf16_flops == pytest.approx(0.5, rel=0.02)
    if card.nvlink_bandwidth is not None:
        assert card.nvlink_bandwidth > card.pcie_bandwidth
    assert card.pcie_bandwidth < card.memory_bandwidth
    assert card.dollars_per_hour is None
    assert card.network_source
    assert (card.per_node == 8) == (card.node_source == "")
    assert 10e9 / 8 <= card.network_bandwidth.low <= card.network_bandwidth.high <= 8 * 800e9 / 8


@pytest.mark.parametrize(
    ("name", "dense"),
    # Datasheets print 242, 733, 1979 and 1513 TFLOPS, with sparsity.
    [
        ("L4", 121e12),
        ("L40S", 362e12),
        ("H100", 989e12),
        ("H100 PCIe", 756e12),
        ("A100-80GB", 312e12),
        ("A30", 165e12),
        ("A40", 149.7e12),
        ("L40", 181e12),
        ("B300", 2250e12),
    ],
)
def test_rates_are_without_sparsity(name, dense):
    assert gpu(name).flops("bf16") == gpu(name).flops("fp16") == dense


@pytest.mark.parametrize(
    "card",
    # GeForce cards have four digits; workstation cards, with a full rate, have not.
    [
        card
        for card in GPUS.values()
        if re.match(r"RTX \d{4}", card.name) and "Ada" not in card.name
    ],
    ids=lambda card: card.name,
)
def test_a_geforce_card_halves_its_rate_with_fp32_sums(card):
    assert card.fp16_flops / card.fp32_flops == pytest.approx(2, rel=0.01)
    assert card.nvlink_bandwidth is None


@pytest.mark.parametrize(
    ("name", "total"),
    # GiB on the box: what is seen of it is less, but no tenth less.
    [("RTX 3060", 12), ("RTX 3070", 8), ("RTX 4080", 16), ("RTX 5070", 12), ("RTX 5080", 16)],
)
def test_a_card_without_a_message_has_a_little_less_than_its_box_says(name, total):
    assert 0.9 * total < gpu(name).memory_bytes / GIB < 0.98 * total


@pytest.mark.parametrize(
    ("name", "seen"),
    # GiB that torch names in out-of-memory messages.
    [
        ("T4", 14.56),
        ("L4", 22.03),
        ("L40S", 44.39),
        ("A100-80GB", 79.14),
        ("H100", 79.10),
        ("H200", 139.80),
        ("B200", 178.35),
        ("V100-32GB", 31.73),
        ("A100-40GB", 39.38),
        ("A30", 23.50),
        ("L40", 44.40),
    ],
)
def test_memory_is_less_than_torch_has_seen_and_not_much_less(name, seen):
    assert seen - 0.02 < gpu(name).memory_bytes / GIB < seen


@pytest.mark.parametrize(
    ("asked", "name"),
    {
        "l4": "L4",
        "L4": "L4",
        "nvidia l4": "L4",
        "NVIDIA L4": "L4",
        "rtx4090": "RTX 4090",
        "4090": "RTX 4090",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "h100": "H100",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "Tesla T4": "T4",
        "Tesla V100-SXM2-16GB": "V100-16GB",
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA A100 80GB PCIe": "A100-80GB PCIe",
        "NVIDIA A100-PCIE-40GB": "A100-40GB PCIe",
        "NVIDIA A10G": "A10G",
        "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
        "NVIDIA GH200 480GB": "GH200-96GB",
        "NVIDIA B200": "B200",
        "NVIDIA B300 SXM6 AC": "B300",
        "NVIDIA GeForce RTX 3060": "RTX 3060",
        "NVIDIA GeForce RTX 3060 Ti": "RTX 3060 Ti",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX 4070 Ti Super",
        "rtx 4060 ti 16gb": "RTX 4060 Ti-16GB",
        "5070ti": "RTX 5070 Ti",
        "5070": "RTX 5070",
        "h20": "H20",
        "a40": "A40",
        "L40": "L40",
    }.items(),
)
def test_names_are_found_as_people_and_drivers_write_them(asked, name):
    assert gpu(asked).name == name


def test_no_name_means_two_gpus():
    words = [word for card in GPUS.values() for word in {card.name, *card.aliases}]
    assert all(gpu(word).name for word in words)
    for card in GPUS.values():
        assert {gpu(word).name for word in (card.name, *card.aliases)} == {card.name}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("a100", ["A100-40GB", "A100-80GB", "A100-80GB PCIe"]),
        ("v100", ["V100-16GB", "V100-32GB"]),
        ("NVIDIA GeForce RTX 3080", ["RTX 3080-10GB", "RTX 3080-12GB"]),
        ("3080", ["RTX 3080-10GB", "RTX 3080-12GB"]),
    ],
)
def test_an_ambiguous_name_is_refused_with_all_that_it_could_be(asked, named):
    with pytest.raises(UsageError) as refusal:
        gpu(asked)
    assert all(name in str(refusal.value) for name in named)


@pytest.mark.parametrize("asked", ["L40X", "A1000", "", "   ", "🙂", "x" * 10_000])
def test_an_unknown_gpu_is_refused_in_two_sentences(asked):
    with pytest.raises(UsageError, match="There is no GPU") as refusal:
        gpu(asked)
    assert "memory_mib" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "asked", ["MI300X", "AMD Instinct MI250", "TPU v4", "v5e", "M3 Max", "mps"]
)
def test_a_gpu_of_another_maker_is_said_not_to_be_planned_and_what_to_do(asked):
    with pytest.raises(UsageError, match="no NVIDIA GPU") as refusal:
        gpu(asked)
    assert "Did you mean" not in str(refusal.value)
    assert EXAMPLE in str(refusal.value)


def test_the_example_of_an_entry_is_one_and_all_that_an_entry_lacks_is_said_at_once(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(EXAMPLE)
    assert gpu("Mine", file=file).has_bf16
    file.write_text('{"name": "Mine", "compute_capability": "9.0", "fp16_tflops": 989}')
    with pytest.raises(UsageError) as refusal:
        gpu("Mine", file=file)
    for key in ("memory_mib", "bf16_tflops", "fp32_tflops", "memory_gb_per_second", "pcie"):
        assert key in str(refusal.value).partition("An entry")[0]
    assert EXAMPLE in str(refusal.value)


def test_different_gpus_are_planned_as_the_least_of_them():
    both, large, small = gpu("H100, A100-40,H100"), gpu("H100"), gpu("A100-40")
    assert both.name == "H100 + A100-40GB"
    assert both.memory_bytes == small.memory_bytes < large.memory_bytes
    assert both.flops("bf16") == small.flops("bf16") < large.flops("bf16")
    slow = gpu("A100-80,RTX 4090")
    assert slow.memory_bytes == gpu("RTX 4090").memory_bytes
    assert slow.nvlink_bandwidth is None
    assert gpu("H100,T4").bf16_flops is None
    (row,) = plan("1b", gpu="H100,A100-40", gpus=2, strategies="ddp").rows
    assert any("the slowest of them" in note for note in row.speed.notes)
    assert not gpu("H100,H100").mixed
    with pytest.raises(UsageError, match="There is no GPU 'H1000'"):
        gpu("A100-40,H1000")


def test_an_offload_on_a_superchip_goes_over_its_own_link_to_the_host():
    card = gpu("GH200")
    assert card.host_link == 450e9 > card.pcie_bandwidth
    assert gpu("H100").host_link == gpu("H100").pcie_bandwidth
    (row,) = plan("1b", gpu="GH200", gpus=1, strategies="zero3_offload").rows
    (copies,) = [t for t in row.speed.terms if t.name == "copies to and from the host"]
    assert copies.inputs["link to the host"] == 450e9


def test_the_speed_of_more_gpus_than_were_ever_measured_is_said_to_be_a_guess():
    assert max(row.job.gpus for row in ROWS) == MOST_MEASURED
    for gpus in (MOST_MEASURED, 100_000):
        (row,) = plan("7b", gpu="H100", gpus=gpus, strategies="fsdp").rows
        guessed = any("is a guess" in note for note in row.speed.notes)
        assert guessed == (gpus > MOST_MEASURED)


def test_a_close_name_is_proposed():
    with pytest.raises(UsageError, match="Did you mean L40S"):
        gpu("L40SX")


def test_a_card_of_two_sizes_is_proposed_with_the_size_that_the_table_has():
    with pytest.raises(UsageError, match=r"Did you mean RTX 4060 Ti-16GB\?"):
        gpu("NVIDIA GeForce RTX 4060 Ti")


def test_native_bf16_starts_with_ampere():
    assert {card.name for card in GPUS.values() if not card.has_bf16} == {
        "T4",
        "V100-16GB",
        "V100-32GB",
    }
    with pytest.raises(UsageError, match="T4 has no bf16 .* Ask for precision fp16"):
        gpu("t4").flops("bf16")


OWN = {
    "name": "RTX 3060",
    "memory_mib": 11900,
    "compute_capability": "8.6",
    "bf16_tflops": 25.6,
    "fp16_tflops": 25.6,
    "fp32_tflops": 12.7,
    "memory_gb_per_second": 360,
    "pcie": "4.0 x16",
    "dollars_per_hour": 0.1,
}

YAML = """
name: RTX 3060
memory_mib: 11900
compute_capability: 8.6
bf16_tflops: 25.6
fp16_tflops: 25.6
fp32_tflops: 12.7
memory_gb_per_second: 360
pcie: 4.0 x16
dollars_per_hour: 0.1
"""


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("own.json", json.dumps(OWN)),
        ("own.json", json.dumps([OWN])),
        ("own.json", json.dumps({"gpus": [OWN]})),
        ("own.yaml", YAML),
    ],
)
def test_users_add_their_own(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    added = gpu("nvidia geforce rtx 3060", file=tmp_path / file)
    assert added.memory_bytes == 11900 << 20
    assert added.flops("bf16") == 25.6e12
    assert added.pcie_bandwidth == pytest.approx(31.5e9, rel=0.001)
    assert added.nvlink_bandwidth is None
    assert added.dollars_per_hour == 0.1
    assert added.network_bandwidth is None
    assert gpu("l4", file=tmp_path / file) == gpu("l4")


@pytest.mark.parametrize(("value", "ends"), [(40, (5e9, 5e9)), ([10, 100], (1.25e9, 12.5e9))])
def test_a_network_is_a_number_or_two_ends(tmp_path, value, ends):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(OWN | {"network_gbps": value}))
    network = gpu("RTX 3060", file=file).network_bandwidth
    assert (network.low, network.high) == ends


def test_a_machine_of_another_size_than_eight_is_planned_as_its_table_says(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(OWN | {"gpus_per_node": 4}))
    for asked, sizes in (
        ({"gpu": "gh200", "gpus": 7}, (7, 1)),
        ({"gpu": "RTX 3060", "gpu_file": file, "gpus": 12}, (3, 4)),
        ({"gpu": "RTX 3060", "gpu_file": file, "gpus": 12, "nodes": 2}, (2, 6)),
        ({"gpu": "h100", "gpus": 12}, (2, 6)),
    ):
        (row,) = plan("1b", strategies="fsdp", **asked).rows
        assert (row.job.nodes, row.job.gpus // row.job.nodes) == sizes


@pytest.mark.parametrize("rate", [0, "none", 15.7])
def test_a_bf16_rate_of_a_gpu_without_bf16_is_ignored(tmp_path, rate):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(OWN | {"compute_capability": "7.5", "bf16_tflops": rate}))
    assert gpu("RTX 3060", file=file).bf16_flops is None


def test_an_own_entry_goes_before_a_built_in_one(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(OWN | {"name": "L4"}))
    assert gpu("L4", file=file).memory_bytes == 11900 << 20
    assert gpu("L4").memory_bytes > 20 * GIB


BROKEN = [
    ("memory_mib", "24GB"),
    ("memory_mib", 0),
    ("memory_mib", -1),
    ("memory_mib", True),
    ("memory_mib", 1e300),
    ("memory_mib", None),
    ("fp16_tflops", [1]),
    ("fp32_tflops", 0),
    ("memory_gb_per_second", "fast"),
    ("compute_capability", "ampere"),
    ("compute_capability", [8, 6]),
    ("pcie", "16x"),
    ("pcie", "9.0 x16"),
    ("pcie", 4),
    ("matmul_share", 1.5),
    ("network_gbps", 0),
    ("network_gbps", [100]),
    ("network_gbps", [100, 10]),
    ("network_gbps", ["10", "100"]),
    ("network_source", 3200),
    ("gpus_per_node", 0),
    ("gpus_per_node", 17),
    ("gpus_per_node", 2.5),
    ("gpus_per_node", True),
    ("dollars_per_hour", -2),
    ("nvlink_gb_per_second", {"a": 1}),
    ("aliases", "3060"),
    ("source", 5),
    ("bf16_tflops", None),
    ("colour", "green"),
]


@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_a_broken_entry_names_file_gpu_key_and_value(tmp_path, key, value):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(OWN | {key: value}))
    with pytest.raises(UsageError) as refusal:
        read_gpus(file)
    text = str(refusal.value)
    assert str(file) in text
    assert "RTX 3060" in text
    assert key in text
    assert value is None or key == "colour" or repr(value) in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("own.json", "{"),
        ("own.json", "[]"),
        ("own.json", "5"),
        ("own.json", '["L4"]'),
        ("own.json", '{"gpus": 5}'),
        ("own.json", '[{"name": 7}]'),
        ("own.json", "[" * 100_000),
        ("own.yaml", "a: [1"),
        ("own.yaml", "!!python/object/apply:os.system [ls]"),
    ],
)
def test_a_broken_file_is_named(tmp_path, file, text):
    path = tmp_path / file
    path.write_text(text)
    with pytest.raises(UsageError) as refusal:
        read_gpus(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        gpu("l4", file=tmp_path / "nowhere.json")


def test_the_same_gpu_twice_in_a_file_is_refused(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps([OWN, OWN]))
    with pytest.raises(UsageError, match="two GPUs called 'RTX 3060'"):
        read_gpus(file)
