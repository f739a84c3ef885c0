"""Strategy -> the files a launcher reads: Accelerate's YAML and DeepSpeed's JSON."""

from toolkit.jobs.config_options import ConfigOptions as ConfigOptions
from toolkit.jobs.config_options import Flag as Flag
from toolkit.jobs.config_options import Precision as Precision
