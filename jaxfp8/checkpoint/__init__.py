"""Checkpoints that other programs load: `export`, `load`, and `weights` for rollout engines."""

from jaxfp8.checkpoint._export import Exported as Exported
from jaxfp8.checkpoint._export import export as export
from jaxfp8.checkpoint._formats import FORMATS as FORMATS
from jaxfp8.checkpoint._formats import Format as Format
from jaxfp8.checkpoint._layouts import LAYOUTS as LAYOUTS
from jaxfp8.checkpoint._layouts import names as names
from jaxfp8.checkpoint._load import load as load
from jaxfp8.checkpoint._names import Row as Row
from jaxfp8.checkpoint._safetensors import CheckpointError as CheckpointError
from jaxfp8.checkpoint._sync import weights as weights
