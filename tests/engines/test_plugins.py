"""The strategy of plugins that a script makes itself, in a launch with a config beside them."""

from types import SimpleNamespace

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

from toolkit.configs.requested import same_features
from toolkit.engines import ulysses
from toolkit.engines.backend import strategy_of_plugins
from toolkit.strategies import STRATEGIES

HYBRID = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


@pytest.fixture
def plugin():
    return FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)


def test_the_groups_of_the_launcher_s_config_count_for_a_plugin_of_the_script_s(
    plugin, monkeypatch
):
    strategy = strategy_of_plugins(None, plugin)
    assert same_features(strategy, STRATEGIES["fsdp"])
    for name, value in HYBRID.items():
        monkeypatch.setenv(name, value)
    strategy = strategy_of_plugins(None, plugin)
    assert strategy.replicas == 2
    assert same_features(strategy, STRATEGIES["fsdp_hybrid"])


def test_the_groups_of_a_script_s_own_parallelism_count_before_those_of_the_config(
    plugin, monkeypatch
):
    for name, value in HYBRID.items():
        monkeypatch.setenv(name, value)
    split = ParallelismConfig(dp_replicate_size=4, dp_shard_size=2)
    assert strategy_of_plugins(None, plugin, split).replicas == 4


def test_an_engine_whose_ranks_share_rows_says_so_itself():
    assert ulysses.is_split(SimpleNamespace(sequence_parallel_size=2))
    assert not ulysses.is_split(SimpleNamespace(sequence_parallel_size=1))
    assert not ulysses.is_split(SimpleNamespace())
