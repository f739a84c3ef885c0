"""Strategy -> the files a launcher reads: Accelerate's YAML and DeepSpeed's JSON."""

from toolkit.configs.accelerate import accelerate_config as accelerate_config
from toolkit.configs.deepspeed import deepspeed_config as deepspeed_config
from toolkit.configs.effective import FittedConfig as FittedConfig
from toolkit.configs.effective import fit_to_run as fit_to_run
from toolkit.configs.files import ConfigFiles as ConfigFiles
from toolkit.configs.files import ConfigOptions as ConfigOptions
from toolkit.configs.files import cached_configs as cached_configs
from toolkit.configs.files import render_configs as render_configs
from toolkit.configs.files import write_bundled as write_bundled
from toolkit.configs.files import write_configs as write_configs
